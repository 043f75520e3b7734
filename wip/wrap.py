import sys,re,textwrap,pathlib
# rewrap over-long prose lines inside docstrings/comments: join with the following line of same indent in paragraph
for p in sys.argv[1:]:
    L=pathlib.Path(p).read_text().split("\n"); i=0
    while i<len(L):
        if len(L[i])>115 and '"""' not in L[i][3:] or (len(L[i])>115 and L[i].lstrip().startswith('"""') and L[i].count('"""')==1):
            ind=re.match(r"\s*",L[i]).group()
            j=i
            para=[L[i].strip()]
            while j+1<len(L) and L[j+1].strip() and re.match(r"\s*",L[j+1]).group()==ind and '"""' not in L[j+1] and not re.match(r"\s*(\w+(, \w+)*:|- |\d\.)\s",L[j+1]):
                j+=1; para.append(L[j].strip())
            new=textwrap.wrap(" ".join(para),115,initial_indent=ind,subsequent_indent=ind,break_long_words=False,break_on_hyphens=False)
            L[i:j+1]=new; i+=len(new)
        else: i+=1
    pathlib.Path(p).write_text("\n".join(L))
