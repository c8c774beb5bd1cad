// A round's tree of guesses as an SVG, and its outcome in words.

import { KINDS, kindOf, wordsOf } from "./parts.js";

const MAX_NODES = 40; // of a drawn tree, beside the accepted ones
const [WIDTH, HEIGHT] = [120, 46]; // of a grid cell; a node takes 112 by 30 of it

export function wordsOfRound(round) {
  if (!round.tokens) return "its guesses are no longer kept.";
  const checked = round.tokens.length - round.num_pruned - 1;
  if (checked < 1 && !round.num_hidden) return "no guesses, the model wrote one token by itself.";
  const right = round.accepted.length;
  const unseen = round.num_hidden > 0 ? ` ${round.num_hidden} more came from what all users share: not shown.` : "";
  return `the model checked ${checked} ${checked === 1 ? "guess" : "guesses"} at once; ${right} ${
    right === 1 ? "was" : "were"} right.${unseen}`;
}

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
  const nodes = []; // {label, note, words, classes, depth, column, parent, taken}
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
    const fate = pruned ? "not worth checking" : accepted.has(node) ? "right" : "wrong";
    const own = add({
      label: spell(round.tokens[node]),
      note: node === 0 ? "the text so far" : `${likely} ${KINDS[kind].short}`,
      words: node === 0 ? "the last token before" : `${wordsOf(round.sources[node])}, ${likely} likely: ${fate}`,
      classes: node === 0 ? "root" : pruned ? "pruned" : kind,
      taken: node === 0 || accepted.has(node),
      depth,
      parent,
    });
    const last = node === 0 ? round.accepted.length === 0 : round.accepted.at(-1) === node;
    if (last && round.new.length > round.accepted.length) {
      const label = spell(round.new.at(-1).text || "…");
      const [note, words] = [KINDS.model.short, KINDS.model.all];
      add({ label, note, words, classes: "model", taken: true, depth: depth + 1, parent: own });
    }
    const rank = (child) => (accepted.has(child) ? 0 : child < verified ? 1 : 2);
    for (const child of children[node].sort((a, b) => rank(a) - rank(b))) place(child, depth + 1, own);
  };
  place(0, 0, null);
  return svgOf(nodes);
}

const spell = (text) => {
  const visible = text.replaceAll("\n", "⏎").replaceAll(" ", "·");
  return visible.length > 14 ? `${visible.slice(0, 13)}…` : visible;
};

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
  const svg = make("svg", { ...size, role: "img", "aria-label": "Tree of guessed tokens" });
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
