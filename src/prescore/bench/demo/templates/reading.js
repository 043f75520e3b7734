// What the default reads for the token that was clicked, in two heads side by side and in all heads in short.
const KINDS = ["sinks", "near", "found", "stands"];
const CONTEXT = 7, LISTED = 6, ONE = 10000;
const percent = (parts) => (parts && parts < 50 ? "<\u00a01\u00a0%" : `${Math.round(parts / 100)}\u00a0%`);

function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  const { text, ...attributes } = options;
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function shares(look, words) {
  const bar = make("div", { class: "shares", role: "img", "aria-label": words });
  KINDS.forEach((kind, place) => bar.append(make("span", { class: kind, style: `width:${look[place] / 100}%` })));
  return bar;
}

function draw(data, look, position) {
  const parts = [];
  const x = (place) => (1000 * place) / (position + 1);
  const rect = (kind, begin, end, opacity) => parts.push(
    `<rect class="${kind}" x="${x(begin).toFixed(1)}" width="${Math.max(1, x(end) - x(begin)).toFixed(1)}" ` +
    `height="30" opacity="${opacity.toFixed(2)}"/>`);
  look[6].forEach((weight, chunk) => {
    const begin = data.sinks + chunk * data.chunk;
    // a chunk is lighter the less its stand-ins weigh, and never quite unseen
    if (weight) rect("stands", begin, begin + data.chunk, Math.min(1, 0.1 + 1.6 * Math.sqrt(weight / ONE)));
  });
  const near = position + 1 - look[5][0];
  rect("near", near, position + 1, 0.85);
  rect("sinks", 0, Math.min(data.sinks, near), 1);
  for (let place = 0; place < look[7].length; place += 2) {
    const width = 1.5 + 4 * Math.sqrt(look[7][place + 1] / ONE);
    parts.push(`<rect class="found" x="${x(look[7][place]).toFixed(1)}" width="${width.toFixed(1)}" height="30"/>`);
  }
  const box = make("div", { class: "map" });
  box.innerHTML = `<svg viewBox="0 0 1000 30" preserveAspectRatio="none" role="img" aria-label="where it reads">${parts.join("")}</svg>`;
  box.append(make("div", { class: "ends" }, make("span", { text: "token 0" }), make("span", { text: `token ${position}, asked` })));
  return box;
}

function context(data, place) {
  const visible = (pieces) => pieces.join("").replaceAll("\n", "⏎");
  return [
    visible(data.pieces.slice(Math.max(0, place - CONTEXT), place)),
    make("mark", { text: visible([data.pieces[place]]) }),
    visible(data.pieces.slice(place + 1, place + 1 + CONTEXT)),
  ];
}

function foundRows(data, look, position) {
  const list = make("ol", { class: "rows" });
  for (let place = 0; place < Math.min(2 * LISTED, look[7].length); place += 2) {
    const [row, weight] = [look[7][place], look[7][place + 1]];
    list.append(make("li", {},
      make("span", { class: "weight", text: `${(weight / 100).toFixed(1)}\u00a0%` }),
      make("span", { class: "where", text: `${position - row} before` }),
      make("span", { class: "words" }, ...context(data, row))));
  }
  return list;
}

function heaviestStandIn(data, look) {
  const weights = look[6];
  if (!Math.max(0, ...weights)) return "";
  const chunk = weights.indexOf(Math.max(...weights)), begin = data.sinks + chunk * data.chunk;
  return `; the heaviest for tokens ${begin} to ${begin + data.chunk - 1} (${percent(weights[chunk])})`;
}

function headName(data, number) {
  const [layer, head] = data.heads[number];
  const kind = number === data.searching ? " (searches)" : number === data.smooth ? " (smooth)" : "";
  return `layer ${layer + 1}, head ${head + 1}${kind}`;
}

function fillCard(card, data, number, query, choose) {
  const look = data.looks[number][query], position = data.first + query;
  const choice = make("select", { "aria-label": "head" });
  data.heads.forEach((_, place) => choice.append(make("option", { value: place, text: headName(data, place) })));
  choice.value = number;
  choice.addEventListener("change", () => choose(Number(choice.value)));
  const [near, found] = look[5], far = Math.max(0, position + 1 - data.sinks - near - found);
  const words = `first tokens ${percent(look[0])}, local part ${percent(look[1])} (${near} keys), ` +
    `found ${percent(look[2])} (${found} rows), stand-ins ${percent(look[3])} (for ${far} keys)`;
  card.replaceChildren(choice, shares(look, words), make("p", { class: "weights", text: `Weight: ${words}.` }),
    draw(data, look, position));
  card.append(found
    ? make("p", { class: "caption", text: `Heaviest of ${found} rows found:` })
    : make("p", { class: "caption", text: "It found no far row that matters by itself." }), foundRows(data, look, position));
  card.append(make("p", { class: "caption",
    text: `Stand-ins carry ${percent(look[3])}${heaviestStandIn(data, look)}. The output is within ` +
      `${(look[4] / 100).toFixed(1)} % of exact attention's.` }));
}

function fillHeads(box, data, query, choose) {
  box.replaceChildren(...data.heads.map(([layer, head], number) => {
    const look = data.looks[number][query];
    const words = `layer ${layer + 1}, head ${head + 1}: found ${look[5][1]} rows with ${percent(look[2])}`;
    const row = make("button", { type: "button", class: "head", title: words, "data-head": number },
      make("span", { class: "name", text: `${layer + 1}.${head + 1}` }), shares(look, words),
      make("span", { class: "value", text: look[5][1] }));
    row.addEventListener("click", () => choose(number));
    return row;
  }));
}

for (const box of document.querySelectorAll(".reading")) {
  const data = JSON.parse(box.querySelector("script").textContent);
  const cards = [...box.querySelectorAll(".card")], chosen = [data.searching, data.smooth];
  let query = data.start;
  const show = () => {
    for (const token of box.querySelectorAll(".token")) {
      const number = Number(token.dataset.query);
      token.classList.toggle("picked", number === query);
      token.classList.toggle("later", number > query);
    }
    box.querySelector(".asked").replaceChildren("Token ", make("b", { text: `${data.first + query}` }), ", ",
      make("mark", { text: data.pieces[data.first + query].replaceAll("\n", "⏎") }),
      `, may see ${data.first + query + 1} keys. Two heads, side by side:`);
    cards.forEach((card, place) => fillCard(card, data, chosen[place], query, (number) => {
      chosen[place] = number;
      show();
    }));
    fillHeads(box.querySelector(".heads"), data, query, (number) => {
      chosen[0] = number;
      show();
    });
  };
  const pick = (event) => {
    const token = event.target.closest(".token");
    if (!token || (event.type === "keydown" && event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    query = Number(token.dataset.query);
    show();
  };
  const passage = box.querySelector(".passage");
  passage.addEventListener("click", pick);
  passage.addEventListener("keydown", pick);
  show();
}
