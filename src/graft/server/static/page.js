// The page: a chat whose tokens show who proposed them, and the rounds behind it. No framework, no build.

const $ = (id) => document.getElementById(id);
let conversation = []; // messages as the API takes them
let stop = null; // an AbortController while an answer comes
let shown = null; // the answer whose figures and rounds are shown
const MAX_NODES = 40; // of a drawn tree, beside the accepted ones

// What each source of grafts is, in words
const SOURCES = {
  suffix: "copied from this conversation",
  past: "copied from earlier answers",
  datastore: "copied from the index",
  trigram: "what followed the same 3 tokens",
  bigram: "what followed the same 2 tokens",
  adjacency: "what followed the same token",
};

const kindOf = (origin) => (origin === "model" ? "model" : origin === "drafted" ? "drafted" : "grafted");

function element(tag, classes = "", text = "") {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  if (text) made.textContent = text;
  return made;
}

// An answer on its way

class Answer {
  constructor(words, lane) {
    this.rounds = [];
    this.counts = {}; // tokens by origin
    this.numTokens = 0;
    this.text = "";
    this.started = null;
    this.seconds = null; // of decoding alone, as the server says at the end
    this.title = element("h3", "", words);
    this.body = element("div", "message waiting");
    lane.append(this.title, this.body);
    this.words = words;
  }

  take(choice) {
    this.started ??= performance.now();
    this.text += choice.delta.content ?? "";
    for (const round of choice.rounds ?? []) this.addRound(round);
    if (choice.speculation) this.seconds = choice.speculation.decode_seconds;
  }

  addRound(round) {
    const number = this.rounds.push(round) - 1;
    for (const piece of round.new) {
      this.numTokens += 1;
      this.counts[piece.origin] = (this.counts[piece.origin] ?? 0) + 1;
      if (!piece.text) continue;
      const span = element("span", `token ${kindOf(piece.origin)}`, piece.text);
      span.title = `${piece.origin === "model" ? "the model's own" : piece.origin}, round ${number + 1}`;
      span.dataset.round = number;
      this.body.append(span);
    }
  }

  end() {
    this.body.classList.remove("waiting");
    // Stop strings cut the text in a token's middle: what is shown is exactly what was answered.
    let left = this.text.length;
    for (const span of [...this.body.querySelectorAll(".token")]) {
      if (span.textContent.length > left) span.textContent = span.textContent.slice(0, left);
      left -= span.textContent.length;
      if (!span.textContent) span.remove();
    }
    if (left > 0) this.body.append(this.text.slice(-left));
    this.title.textContent = `${this.words} · ${this.speed.toFixed(1)} tokens/s`;
  }

  get speed() {
    const seconds = this.seconds ?? (performance.now() - this.started) / 1000;
    return this.started === null || seconds <= 0 ? 0 : this.numTokens / seconds;
  }

  get meanAccepted() {
    const own = this.counts.model ?? 0;
    return this.rounds.length ? 1 + (this.numTokens - own) / this.rounds.length : 0;
  }
}

async function stream(answer, speculate) {
  const seed = parseInt($("seed").value, 10);
  const headers = { "Content-Type": "application/json" };
  if ($("key").value) headers.Authorization = `Bearer ${$("key").value}`;
  const response = await fetch("v1/chat/completions", {
    method: "POST",
    headers,
    signal: stop.signal,
    body: JSON.stringify({
      messages: conversation,
      stream: true,
      return_rounds: true,
      speculate,
      temperature: Number($("temperature").value) || 0,
      max_tokens: Math.max(1, parseInt($("max-tokens").value, 10) || 256),
      ...(Number.isNaN(seed) ? {} : { seed }),
    }),
  });
  if (!response.ok) throw new Error((await response.json()).error.message);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      for (const choice of chunk.choices) answer.take(choice);
      if (answer === shown) showFigures();
      stayAtEnd();
    }
  }
}

function stayAtEnd() {
  const box = $("messages");
  if (box.scrollHeight - box.scrollTop - box.clientHeight < 160) box.scrollTop = box.scrollHeight;
}

async function ask(text) {
  $("welcome").hidden = true;
  const talk = conversation; // a new one may begin before this answer has ended
  talk.push({ role: "user", content: text });
  $("messages").append(element("div", "message user", text));
  const racing = $("race").checked;
  const answers = element("div", racing ? "answers racing" : "answers");
  const lanes = racing ? [element("div", "lane"), element("div", "lane")] : [element("div", "lane")];
  answers.append(...lanes);
  $("messages").append(answers);
  $("messages").scrollTop = $("messages").scrollHeight;
  const graft = new Answer("Graft", lanes.at(-1));
  const plain = racing ? new Answer("Plain decoding", lanes[0]) : null;
  show(graft);
  stop = new AbortController();
  $("send").textContent = "Stop";
  const runs = [follow(graft, true), ...(plain ? [follow(plain, false)] : [])];
  await Promise.all(runs);
  if (plain && plain.text && graft.text) sayWhoWon(plain, graft, answers);
  stop = null;
  $("send").textContent = "Send";
  if (graft.text) talk.push({ role: "assistant", content: graft.text });
  else talk.pop();
  showFigures();
  $("prompt").focus();
}

async function follow(answer, speculate) {
  try {
    await stream(answer, speculate);
  } catch (error) {
    if (error.name !== "AbortError") answer.body.append(element("p", "error", error.message));
  }
  answer.end();
}

function sayWhoWon(plain, graft, answers) {
  const same = plain.text === graft.text ? "The same text" : "Another text (stopped early?)";
  const words = `${same}; Graft was ${(graft.speed / plain.speed).toFixed(2)} times as fast. ` +
    "They share the machine, turn by turn: speeds count each one's own turns.";
  const note = element("p", "quiet message", words);
  note.id = "verdict";
  document.querySelectorAll("#verdict").forEach((old) => old.removeAttribute("id"));
  answers.after(note);
  stayAtEnd();
}

// Figures and rounds

function show(answer) {
  shown = answer;
  $("rounds").replaceChildren();
  $("tree").hidden = true;
  showFigures();
}

function showFigures() {
  const rounds = shown?.rounds ?? [];
  const counts = shown?.counts ?? {};
  $("speed").textContent = shown?.numTokens ? shown.speed.toFixed(1) : "–";
  $("accepted").textContent = rounds.length ? shown.meanAccepted.toFixed(2) : "–";
  $("rounds-count").textContent = rounds.length || "–";
  const kinds = { drafted: 0, grafted: 0, model: 0 };
  for (const [origin, count] of Object.entries(counts)) kinds[kindOf(origin)] += count;
  $("bar").replaceChildren(...Object.entries(kinds).map(([kind, count]) => {
    const part = element("span", kind);
    part.style.flexGrow = count;
    return part;
  }));
  const words = { drafted: "drafted", grafted: "grafted", model: "the model's own" };
  const rows = [];
  for (const [kind, count] of Object.entries(kinds)) {
    rows.push(share(words[kind], count, kind));
    if (kind !== "grafted") continue;
    for (const [origin, part] of Object.entries(counts)) {
      if (kindOf(origin) === "grafted") rows.push(share(SOURCES[origin] ?? origin, part, null));
    }
  }
  $("shares").replaceChildren(...rows);
  for (let number = $("rounds").childElementCount; number < rounds.length; number += 1) addRoundBar(number);
}

function share(words, count, kind) {
  const row = element("li", kind ? "" : "sub");
  if (kind) row.append(element("span", `swatch ${kind}`));
  const percent = shown?.numTokens ? `${count} · ${Math.round((100 * count) / shown.numTokens)}%` : "";
  row.append(element("span", "", words), element("span", "count", percent));
  return row;
}

function addRoundBar(number) {
  const round = shown.rounds[number];
  const bar = element("button", "round");
  bar.type = "button";
  bar.tabIndex = number === 0 ? 0 : -1;
  bar.setAttribute("role", "option");
  bar.setAttribute("aria-selected", "false");
  bar.setAttribute("aria-label", `Round ${number + 1}, ${round.new.length} tokens`);
  for (const piece of round.new) {
    const block = element("i", kindOf(piece.origin));
    block.style.height = `${Math.min(7, 110 / round.new.length)}px`; // a very good round is no tower
    bar.append(block);
  }
  bar.addEventListener("click", () => choose(number));
  const box = $("rounds");
  const atEnd = box.scrollWidth - box.scrollLeft - box.clientWidth < 40;
  box.append(bar);
  if (atEnd) box.scrollLeft = box.scrollWidth;
}

function choose(number) {
  const bars = [...$("rounds").children];
  if (!bars[number]) return;
  bars.forEach((bar, place) => {
    bar.setAttribute("aria-selected", String(place === number));
    bar.tabIndex = place === number ? 0 : -1;
  });
  bars[number].focus({ preventScroll: true });
  bars[number].scrollIntoView({ block: "nearest", inline: "nearest" });
  document.querySelectorAll(".token.chosen").forEach((token) => token.classList.remove("chosen"));
  shown.body.querySelectorAll(`[data-round="${number}"]`).forEach((token) => token.classList.add("chosen"));
  drawTree(shown.rounds[number], number);
}

// A round's tree

function drawTree(round, number) {
  const size = round.tokens.length;
  const verified = size - round.num_pruned; // the last nodes were proposed, and pruned
  const accepted = new Set(round.accepted);
  const reach = [1];
  for (let node = 1; node < size; node += 1) reach[node] = reach[round.parents[node]] * round.probabilities[node];
  const ranked = [...Array(verified).keys()].slice(1).sort((a, b) => reach[b] - reach[a]);
  const kept = new Set([0, ...accepted, ...ranked.slice(0, MAX_NODES)]);
  for (let node = verified; node < size; node += 1) if (kept.has(round.parents[node])) kept.add(node);
  const children = Array.from({ length: size }, () => []);
  for (let node = 1; node < size; node += 1) if (kept.has(node)) children[round.parents[node]].push(node);

  // Depth goes down. What was accepted stands leftmost; every node as far left as its level and its parent allow.
  const nodes = []; // {label, note, classes, depth, column, parent, taken}
  const free = []; // by depth, the next column
  const add = (node) => {
    node.column = Math.max(free[node.depth] ?? 0, node.parent?.column ?? 0);
    free[node.depth] = node.column + 1;
    nodes.push(node);
    return node;
  };
  const place = (node, depth, parent) => {
    const pruned = node >= verified;
    const whose = pruned ? "pruned" : round.sources[node];
    const own = add({
      label: spell(round.tokens[node]),
      note: node === 0 ? "" : `${round.probabilities[node].toFixed(2)} ${whose}`,
      classes: node === 0 ? "root" : pruned ? "pruned" : kindOf(round.sources[node]),
      taken: node === 0 || accepted.has(node),
      depth,
      parent,
    });
    const last = node === 0 ? round.accepted.length === 0 : round.accepted.at(-1) === node;
    if (last && round.new.length > round.accepted.length) {
      const label = spell(round.new.at(-1).text || "…");
      add({ label, note: "model's own", classes: "model", taken: true, depth: depth + 1, parent: own });
    }
    const rank = (child) => (accepted.has(child) ? 0 : child < verified ? 1 : 2);
    for (const child of children[node].sort((a, b) => rank(a) - rank(b))) place(child, depth + 1, own);
  };
  place(0, 0, null);

  const hidden = verified - [...kept].filter((node) => node < verified).length;
  const some = verified > 1 || round.num_hidden > 0;
  const outcome = some ? `${accepted.size} of ${verified - 1} verified tokens accepted` : "plain decoding, no tree";
  const rest = [
    hidden > 0 ? `; ${hidden} less likely not drawn` : "",
    round.num_hidden > 0 ? `; ${round.num_hidden} proposed from what all requests share not shown` : "",
  ];
  $("tree-words").textContent = `Round ${number + 1}: ${outcome}${rest.join("")}.`;
  $("tree-scroll").replaceChildren(svgOf(nodes));
  $("tree").hidden = false;
}

const spell = (text) => {
  const visible = text.replaceAll("\n", "⏎").replaceAll(" ", "·");
  return visible.length > 12 ? `${visible.slice(0, 11)}…` : visible;
};

function svgOf(nodes) {
  const [WIDTH, HEIGHT] = [104, 46]; // of a place; a node takes 96 by 30 of it
  const make = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const most = (what) => 1 + Math.max(...nodes.map((node) => node[what]));
  const x = (node) => 8 + node.column * WIDTH;
  const y = (node) => 8 + node.depth * HEIGHT;
  const size = { width: WIDTH * most("column") + 8, height: HEIGHT * most("depth") };
  const svg = make("svg", { ...size, role: "img", "aria-label": "Tree of proposed tokens" });
  for (const node of nodes.filter((one) => one.parent)) {
    const [x1, y1, x2, y2] = [x(node.parent) + 48, y(node.parent) + 30, x(node) + 48, y(node)];
    const path = `M${x1} ${y1} C${x1} ${y1 + 10} ${x2} ${y2 - 10} ${x2} ${y2}`;
    svg.append(make("path", { d: path, class: node.taken && node.parent.taken ? "taken" : "" }));
  }
  for (const node of nodes) {
    const group = make("g", {
      class: `${node.classes} ${node.taken ? "taken" : "missed"}`,
      transform: `translate(${x(node)} ${y(node)})`,
    });
    group.append(make("rect", { width: 96, height: 30, rx: 5 }));
    group.append(make("text", { x: 6, y: 13 }, node.label));
    group.append(make("text", { x: 6, y: 25, class: "likely" }, node.note));
    svg.append(group);
  }
  return svg;
}

// Hands on the keyboard

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (stop) {
    stop.abort();
    return;
  }
  const text = $("prompt").value.trim();
  if (!text) return;
  $("prompt").value = "";
  ask(text);
});

$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!stop) $("ask").requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && stop) stop.abort();
  const typing = ["INPUT", "TEXTAREA"].includes(event.target.tagName) && event.target.value;
  if (!shown || typing || !["ArrowLeft", "ArrowRight"].includes(event.key)) return;
  if (event.target.id === "tree-scroll") return; // scrolls
  const now = [...$("rounds").children].findIndex((bar) => bar.getAttribute("aria-selected") === "true");
  const next = event.key === "ArrowRight" ? now + 1 : Math.max(now - 1, 0);
  choose(Math.min(next, shown.rounds.length - 1));
  event.preventDefault();
});

$("messages").addEventListener("click", (event) => {
  const token = event.target.closest(".token");
  if (token && shown?.body.contains(token)) choose(Number(token.dataset.round));
});

$("clear").addEventListener("click", () => {
  stop?.abort();
  conversation = [];
  $("messages").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  show(null);
  $("prompt").focus();
});

async function nameModel() {
  const headers = $("key").value ? { Authorization: `Bearer ${$("key").value}` } : {};
  const response = await fetch("v1/models", { headers });
  $("model").textContent = response.ok ? (await response.json()).data[0].id : "needs an API key: see Settings";
}
$("key").addEventListener("change", nameModel);
nameModel();
showFigures();
$("prompt").focus();
