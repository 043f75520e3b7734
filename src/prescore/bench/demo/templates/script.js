// What the default reads for the picked token: two heads side by side, and all heads in short.
// A query's reads are the fields of QueryReads in run.py, in turn.
const KINDS = ["sinks", "local", "far", "centroids"];
const ERROR = 4, COUNTS = 5, CHUNKS = 6, HEAVIEST = 7;
const BEFORE = 48, CONTEXT = 7, LISTED = 6, ONE = 10000;
const percent = (parts) => (parts && parts < 50 ? "<\u00a01\u00a0%" : `${Math.round(parts / 100)}\u00a0%`);

function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  const { text, ...attributes } = options;
  if (text !== undefined) node.textContent = text;
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// A token of line ends is shown, and still ends the line.
function visible(token) {
  return /^\n*$/.test(token) ? "⏎".repeat(Math.max(1, token.length)) + token : token;
}

function shares(reads, words) {
  const bar = make("div", { class: "shares", role: "img", "aria-label": words });
  KINDS.forEach((kind, place) => bar.append(make("span", { class: kind, style: `width:${reads[place] / 100}%` })));
  return bar;
}

function draw(data, reads, position) {
  const parts = [];
  const x = (place) => (1000 * place) / (position + 1);
  const rect = (kind, begin, end, opacity) => parts.push(
    `<rect class="${kind}" x="${x(begin).toFixed(1)}" width="${Math.max(1, x(end) - x(begin)).toFixed(1)}" ` +
    `height="30" opacity="${opacity.toFixed(2)}"/>`);
  reads[CHUNKS].forEach((weight, chunk) => {
    const begin = data.sinks + chunk * data.chunk;
    // a chunk is lighter the less its centroids weigh, and never invisible
    if (weight) rect("centroids", begin, begin + data.chunk, Math.min(1, 0.1 + 1.6 * Math.sqrt(weight / ONE)));
  });
  const local = position + 1 - reads[COUNTS][0];
  rect("local", local, position + 1, 0.85);
  rect("sinks", 0, Math.min(data.sinks, local), 1);
  for (let place = 0; place < reads[HEAVIEST].length; place += 2) {
    const width = 1.5 + 4 * Math.sqrt(reads[HEAVIEST][place + 1] / ONE);
    parts.push(`<rect class="far" x="${x(reads[HEAVIEST][place]).toFixed(1)}" width="${width.toFixed(1)}" height="30"/>`);
  }
  const box = make("div", { class: "map" });
  box.innerHTML = `<svg viewBox="0 0 1000 30" preserveAspectRatio="none" role="img" aria-label="where it reads">${parts.join("")}</svg>`;
  box.append(make("div", { class: "ends" }, make("span", { text: "token 0" }), make("span", { text: `token ${position}, picked` })));
  return box;
}

function context(data, place) {
  const oneLine = (tokens) => tokens.join("").replaceAll("\n", "⏎");
  return [
    oneLine(data.tokens.slice(Math.max(0, place - CONTEXT), place)),
    make("mark", { text: oneLine([data.tokens[place]]) }),
    oneLine(data.tokens.slice(place + 1, place + 1 + CONTEXT)),
  ];
}

function farKeys(data, reads, position) {
  const list = make("ol", { class: "far-keys" });
  for (let place = 0; place < Math.min(2 * LISTED, reads[HEAVIEST].length); place += 2) {
    const [key, weight] = [reads[HEAVIEST][place], reads[HEAVIEST][place + 1]];
    list.append(make("li", {},
      make("span", { class: "weight", text: `${(weight / 100).toFixed(1)}\u00a0%` }),
      make("span", { class: "where", text: `${position - key} before` }),
      make("span", { class: "words" }, ...context(data, key))));
  }
  return list;
}

function heaviestCentroids(data, reads) {
  const weights = reads[CHUNKS];
  if (!Math.max(0, ...weights)) return "";
  const chunk = weights.indexOf(Math.max(...weights)), begin = data.sinks + chunk * data.chunk;
  return `; the heaviest for tokens ${begin} to ${begin + data.chunk - 1} (${percent(weights[chunk])})`;
}

function headName(data, number) {
  const [layer, head] = data.heads[number];
  const kind = number === data.searching ? " (searches)" : number === data.smooth ? " (smooth)" : "";
  return `layer ${layer + 1}, head ${head + 1}${kind}`;
}

function fillCard(card, data, number, query, name, choose) {
  const reads = data.reads[number][query], position = data.first + query;
  const choice = make("select", { "aria-label": name });
  data.heads.forEach((_, place) => choice.append(make("option", { value: place, text: headName(data, place) })));
  choice.value = number;
  choice.addEventListener("change", () => choose(Number(choice.value)));
  const [local, far] = reads[COUNTS], unread = Math.max(0, position + 1 - data.sinks - local - far);
  const words = `first tokens ${percent(reads[0])}, local ${percent(reads[1])} (${local} keys), ` +
    `far ${percent(reads[2])} (${far} keys), centroids ${percent(reads[3])} (of ${unread} unread keys)`;
  card.replaceChildren(choice, shares(reads, words), make("p", { class: "weights", text: `Weight: ${words}.` }),
    draw(data, reads, position));
  card.append(far
    ? make("p", { class: "caption", text: `Heaviest of ${far} far keys read:` })
    : make("p", { class: "caption", text: "No far key exceeds the threshold." }), farKeys(data, reads, position));
  card.append(make("p", { class: "caption",
    text: `Centroids carry ${percent(reads[3])}${heaviestCentroids(data, reads)}. The output is within ` +
      `${(reads[ERROR] / 100).toFixed(1)} % of exact attention's.` }));
}

function fillHeads(box, data, query, choose) {
  box.replaceChildren(...data.heads.map(([layer, head], number) => {
    const reads = data.reads[number][query];
    const words = `layer ${layer + 1}, head ${head + 1}: ${reads[COUNTS][1]} far keys with ${percent(reads[2])}`;
    const row = make("button", { type: "button", class: "head", title: words, "data-head": number },
      make("span", { class: "name", text: `${layer + 1}.${head + 1}` }), shares(reads, words),
      make("span", { class: "value", text: reads[COUNTS][1] }));
    row.addEventListener("click", () => choose(number));
    return row;
  }));
}

// The query to begin with: of those that are words, the one with most weight on far keys.
function firstQuery(data) {
  const queries = data.reads[data.searching].map((reads, query) => ({ query, weight: reads[2] }));
  const words = queries.filter(({ query }) => (data.tokens[data.first + query].match(/\p{L}/gu) || []).length > 2);
  return (words.length ? words : queries).reduce((best, other) => (other.weight > best.weight ? other : best)).query;
}

for (const box of document.querySelectorAll(".reads")) {
  const data = JSON.parse(box.querySelector("script").textContent);
  const cards = [...box.querySelectorAll(".card")], chosen = [data.searching, data.smooth];
  const passage = box.querySelector(".passage"), before = data.tokens.slice(Math.max(0, data.first - BEFORE), data.first);
  passage.append(make("span", { class: "before", text: before.join("") }), ...data.tokens.slice(data.first).map(
    (token, number) => make("span", { class: "token", role: "button", tabindex: -1, "data-query": number, text: visible(token) })));
  let query = firstQuery(data);
  const show = () => {
    for (const token of box.querySelectorAll(".token")) {
      const number = Number(token.dataset.query);
      token.classList.toggle("picked", number === query);
      token.setAttribute("aria-pressed", number === query);
      token.tabIndex = number === query ? 0 : -1;
      token.classList.toggle("later", number > query);
    }
    box.querySelector(".picked-token").replaceChildren("Token ", make("b", { text: `${data.first + query}` }), ", ",
      make("mark", { text: data.tokens[data.first + query].replaceAll("\n", "⏎") }),
      ` sees ${data.first + query + 1} keys. Two heads, side by side:`);
    cards.forEach((card, place) => fillCard(card, data, chosen[place], query, `head on the ${place ? "right" : "left"}`, (number) => {
      chosen[place] = number;
      show();
    }));
    fillHeads(box.querySelector(".heads"), data, query, (number) => {
      chosen[0] = number;
      show();
    });
  };
  const tokens = [...box.querySelectorAll(".token")];
  // the passage scrolls by itself: the page stays where it is
  const reveal = () => {
    const [line, frame] = [tokens[query].getBoundingClientRect(), passage.getBoundingClientRect()];
    if (line.top < frame.top || line.bottom > frame.bottom) {
      passage.scrollTop += line.top - frame.top - (passage.clientHeight - line.height) / 2;
    }
  };
  const pick = (number) => {
    query = Math.max(0, Math.min(tokens.length - 1, number));
    show();
    reveal();
  };
  const lineBeside = (step) => {
    const [here, all] = [tokens[query].getBoundingClientRect(), tokens.map((token) => token.getBoundingClientRect())];
    let number = query;
    while (tokens[number + step] && Math.abs(all[number].top - here.top) < 4) number += step;
    while (tokens[number + step] && Math.abs(all[number + step].top - all[number].top) < 4 &&
      (all[number].left - here.left) * step < 0) number += step;
    return number;
  };
  const moves = { ArrowLeft: () => query - 1, ArrowRight: () => query + 1, ArrowUp: () => lineBeside(-1),
    ArrowDown: () => lineBeside(1), Home: () => 0, End: () => tokens.length - 1 };
  passage.addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    if (token) pick(Number(token.dataset.query));
  });
  passage.addEventListener("keydown", (event) => {
    if (!event.target.closest(".token") || !(event.key in moves)) return;
    event.preventDefault();
    pick(moves[event.key]());
    tokens[query].focus({ preventScroll: true });
  });
  show();
  reveal();
}
