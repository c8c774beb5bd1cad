// A round's tree of guesses: drawn, as a list for screen readers, and its outcome in words.

import { KINDS, counted, element, kindOf, wordsOf } from "./parts.js";

const MAX_NODES = 40; // of a drawn tree, beside the accepted ones
const [WIDTH, HEIGHT] = [120, 46]; // of a grid cell; a node takes 112 by 30 of it

// What the welcome shows: an example with every kind of guess
export const SAMPLE = {
  tokens: [" is", " blue", " clear", " because", " today"],
  parents: [0, 0, 0, 1, 1],
  probabilities: [1, 0.62, 0.21, 0.8, 0.07],
  sources: ["root", "drafted", "trigram", "suffix", "drafted"],
  accepted: [1, 3],
  num_pruned: 0,
  num_hidden: 0,
  new: [{ text: " blue" }, { text: " because" }, { text: " sunlight" }],
};

const numChecked = (round) => (round.tokens ? round.tokens.length - round.num_pruned - 1 : 0);

export const hasTree = (round) => numChecked(round) > 0;

export function wordsOfRound(round) {
  if (!round.tokens) return "The guesses of this round are no longer kept.";
  const unseen = round.num_hidden > 0 ? ` ${round.num_hidden} more may be other users' text and are not shown.` : "";
  const checked = numChecked(round);
  if (checked < 1 && !round.num_hidden) {
    const why = round.tokens.length > 1 ? "No guess was worth checking" : "No guesses";
    return `${why}: the model wrote one token by itself.`;
  }
  const right = round.accepted.length;
  const outcome = right === 0 ? "none was right" : `${right} ${right === 1 ? "was" : "were"} right`;
  const own = round.new.length > right ? ", and it wrote the next token itself" : "";
  return `The model checked ${counted(checked, "guess", "guesses")} in one step: ${outcome}${own}.${unseen}`;
}

// A round's tree: {drawing, list, numLeftOut}. The list says the same as the drawing, for screen readers.
export function drawTree(round) {
  const size = round.tokens.length;
  const verified = size - round.num_pruned; // the last nodes were pruned
  const accepted = new Set(round.accepted);
  const reach = [1];
  for (let node = 1; node < size; node += 1) reach[node] = reach[round.parents[node]] * round.probabilities[node];
  const ranked = [...Array(verified).keys()].slice(1).sort((a, b) => reach[b] - reach[a]);
  const kept = new Set([0, ...accepted, ...ranked.slice(0, MAX_NODES)]);
  for (let node = verified; node < size; node += 1) if (kept.has(round.parents[node])) kept.add(node);
  const children = Array.from({ length: size }, () => []);
  for (let node = 1; node < size; node += 1) if (kept.has(node)) children[round.parents[node]].push(node);

  // Depth grows downwards. Accepted nodes come first; each node stands as far left as its level and its parent allow.
  const nodes = []; // {label, text, note, words, classes, depth, column, parent, taken}
  const free = []; // by depth, the next column
  const add = (node) => {
    node.column = Math.max(free[node.depth] ?? 0, node.parent?.column ?? 0);
    free[node.depth] = node.column + 1;
    nodes.push(node);
    return node;
  };
  const place = (node, depth, parent) => {
    const pruned = node >= verified;
    const kind = kindOf(round.sources[node]);
    const likely = `${Math.round(100 * round.probabilities[node])}%`;
    const isTaken = accepted.has(node);
    const fate = pruned ? "not worth checking" : isTaken ? "right" : "wrong";
    const own = add({
      label: (isTaken ? "✓ " : "") + spell(round.tokens[node]),
      text: round.tokens[node],
      note: node === 0 ? "the text so far" : `${KINDS[kind].short}, ${likely}`,
      words: node === 0 ? "the last token before" : `${wordsOf(round.sources[node])}, ${likely} likely: ${fate}`,
      classes: node === 0 ? "root" : pruned ? "pruned" : kind,
      taken: node === 0 || isTaken,
      depth,
      parent,
    });
    const last = node === 0 ? round.accepted.length === 0 : round.accepted.at(-1) === node;
    if (last && round.new.length > round.accepted.length) {
      const text = round.new.at(-1).text || "…";
      const [note, words] = [KINDS.model.short, KINDS.model.all];
      add({ label: spell(text), text, note, words, classes: "model", taken: true, depth: depth + 1, parent: own });
    }
    const rank = (child) => (accepted.has(child) ? 0 : child < verified ? 1 : 2);
    for (const child of children[node].sort((a, b) => rank(a) - rank(b))) place(child, depth + 1, own);
  };
  place(0, 0, null);
  return { drawing: svgOf(nodes), list: listOf(nodes), numLeftOut: size - kept.size };
}

const spell = (text) => {
  const visible = text.replace(/^ (?=\S)/, "").replaceAll("\n", "⏎").replaceAll(" ", "·");
  return visible.length > 14 ? `${visible.slice(0, 13)}…` : visible;
};

// The nodes as nested lists, parents before children
function listOf(nodes) {
  const items = new Map();
  const [root, ...others] = nodes;
  const top = element("ul", "unseen");
  const add = (list, node) => {
    const item = element("li", "", `${node.text.trim() || "a space or line break"}: ${node.words}`);
    items.set(node, item);
    list.append(item);
  };
  add(top, root);
  for (const node of others) {
    const parent = items.get(node.parent);
    if (!parent.querySelector("ul")) parent.append(element("ul"));
    add(parent.querySelector("ul"), node);
  }
  return top;
}

function svgOf(nodes) {
  const make = (tag, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const most = (what) => 1 + Math.max(...nodes.map((node) => node[what]));
  const x = (node) => 8 + node.column * WIDTH;
  const y = (node) => 8 + node.depth * HEIGHT;
  const middle = (WIDTH - 8) / 2;
  const size = { width: WIDTH * most("column") + 8, height: HEIGHT * most("depth") };
  const svg = make("svg", { ...size, "aria-hidden": "true" });
  for (const node of nodes.filter((one) => one.parent)) {
    const [x1, y1, x2, y2] = [x(node.parent) + middle, y(node.parent) + 30, x(node) + middle, y(node)];
    const path = `M${x1} ${y1} C${x1} ${y1 + 10} ${x2} ${y2 - 10} ${x2} ${y2}`;
    svg.append(make("path", { d: path, class: node.taken && node.parent.taken ? "taken" : "" }));
  }
  for (const node of nodes) {
    const group = make("g", {
      class: `${node.classes} ${node.taken ? "taken" : "missed"}`,
      transform: `translate(${x(node)} ${y(node)})`,
    });
    group.append(make("title", {}, node.words));
    group.append(make("rect", { width: WIDTH - 8, height: 30, rx: 5 }));
    group.append(make("text", { x: 6, y: 13 }, node.label));
    group.append(make("text", { x: 6, y: 25, class: "likely" }, node.note));
    svg.append(group);
  }
  return svg;
}
