// Shared by the page's modules: making elements, and the words and colours of a token's origin.

export const $ = (id) => document.getElementById(id);

export function element(tag, classes = "", text = "") {
  const made = document.createElement(tag);
  if (classes) made.className = classes;
  if (text) made.textContent = text;
  return made;
}

export function button(words, act, classes = "") {
  const made = element("button", classes, words);
  made.type = "button";
  made.addEventListener("click", act);
  return made;
}

export const counted = (count, one, several = `${one}s`) => `${count} ${count === 1 ? one : several}`;

// One colour each, defined in page.css by these names
export const KINDS = {
  drafted: { all: "guessed by a small network", short: "guessed" },
  copied: { all: "copied from earlier text", short: "copied" },
  seen: { all: "seen before", short: "seen before" },
  model: { all: "written by the model", short: "the model" },
};

// The kind of each origin that the server names, and its words if the kind has several origins
const ORIGINS = {
  drafted: ["drafted"],
  suffix: ["copied", "copied from this chat"],
  past: ["copied", "copied from an earlier answer"],
  trigram: ["seen"],
  bigram: ["seen"],
  adjacency: ["seen"],
  model: ["model"],
};

export const kindOf = (origin) => (ORIGINS[origin] ?? ORIGINS.adjacency)[0];
export const wordsOf = (origin) => ORIGINS[origin]?.[1] ?? KINDS[kindOf(origin)].all;

export function swatchRow(kind, words) {
  const row = element("li");
  row.append(element("span", `swatch ${kind}`), element("span", "", words));
  return row;
}
