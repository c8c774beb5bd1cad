// Markdown as elements. `marked` finds the structure, and the elements are made here. Whatever was written only becomes
// text nodes, so nothing in it can run: HTML is shown as it is spelt, and only links to the web are links.

import { element } from "./parts.js";
import { lexer } from "./vendor/marked.js";

const THINK = /^\s*<think>([^]*?)(?:<\/think>|$)/; // reasoning, which some models write before they answer
const INLINE = { strong: "strong", em: "em", del: "del", codespan: "code", link: "a", image: "a" };

// Shows a text in a box. write(text, places): nodes for a text whose characters stand at these places of the source.
// Until the box is emptied, the text may only grow: only its last block is rendered again.
export function showMarkdown(box, source, write) {
  const text = source.replaceAll("\r", " "); // marked would change its length
  let at = Number(box.lastElementChild?.dataset.from ?? 0);
  box.lastElementChild?.remove();
  const add = (made) => {
    made.dataset.from = at;
    box.append(made);
  };
  const thought = at === 0 && text.match(THINK);
  if (thought) {
    const quote = element("blockquote");
    appendBlocks(quote, tokensOf(thought[1]), new Cursor(text, text.indexOf(">") + 1, write));
    add(quote);
    at = thought[0].length;
  }
  for (const token of tokensOf(text.slice(at))) {
    if (token.type !== "space") add(blockOf(token, new Cursor(text, at, write), box));
    at += token.raw.length;
  }
}

function tokensOf(text) {
  try {
    return lexer(text);
  } catch { // nested too deeply
    return [{ type: "html", raw: text }];
  }
}

// Finds out where in the source the texts stand that marked took from it.
class Cursor {
  constructor(source, at, write) {
    Object.assign(this, { source, at, write });
  }

  // The places of a text's characters. Each line is searched for by itself: indents and quote marks are gone.
  find(text) {
    const places = [];
    for (const line of text.split("\n")) {
      const found = this.source.indexOf(line, this.at);
      const start = found < 0 ? this.at : found;
      for (let place = 0; place <= line.length; place += 1) places.push(start + place); // and the line break's
      this.at = start + line.length;
    }
    return places;
  }

  nodes(text) {
    return this.write(text, this.find(text));
  }
}

function appendBlocks(parent, tokens, cursor) {
  for (const token of tokens) {
    if (token.type === "text") appendInline(parent, token.tokens, cursor);
    else if (token.type === "checkbox") appendInline(parent, [token], cursor);
    else if (token.type !== "space") parent.append(blockOf(token, cursor, parent));
  }
}

function blockOf(token, cursor, parent) {
  const tags = { code: "pre", heading: `h${levelOf(token, parent)}`, list: token.ordered ? "ol" : "ul" };
  const made = element(tags[token.type] ?? (["blockquote", "table", "hr"].includes(token.type) ? token.type : "p"));
  if (token.type === "code") {
    if (token.codeBlockStyle !== "indented") cursor.find(token.raw.split("\n", 1)[0]);
    const code = element("code");
    code.append(...cursor.nodes(token.text));
    made.append(code);
    made.tabIndex = 0; // long lines scroll
  } else if (token.type === "blockquote") {
    appendBlocks(made, token.tokens, cursor);
  } else if (token.type === "list") {
    if (token.ordered) made.start = token.start;
    for (const { raw, tokens } of token.items) {
      const item = element("li");
      cursor.find(raw.match(/^\s*\S+/)[0]); // its bullet or number
      appendBlocks(item, tokens, cursor);
      made.append(item);
    }
  } else if (token.type === "table") {
    [token.header, ...token.rows].forEach((cells, place) => {
      const row = element("tr");
      for (const { tokens } of cells) {
        const cell = element(place === 0 ? "th" : "td");
        appendInline(cell, tokens, cursor);
        row.append(cell);
      }
      made.append(row);
    });
  } else if (token.tokens) {
    appendInline(made, token.tokens, cursor);
  } else if (token.type !== "hr") {
    made.append(...cursor.nodes(token.raw.trimEnd()));
  }
  return made;
}

// The page's own headings go down to 3, and no level is skipped below.
function levelOf({ depth }, parent) {
  const before = [...parent.children].findLast((one) => /^H\d$/.test(one.tagName));
  return Math.min(Number(before?.tagName[1] ?? 3) + 1, depth + 3, 6);
}

function appendInline(parent, tokens, cursor) {
  for (const token of tokens) {
    const [start] = cursor.find(token.raw);
    const inside = new Cursor(cursor.source, start, cursor.write);
    const tag = INLINE[token.type];
    if (!tag || (tag === "a" && !/^https?:\/\//.test(token.href))) {
      parent.append(...inside.nodes(token.type === "escape" ? token.text : token.raw));
      continue;
    }
    const made = element(tag);
    if (tag === "a") Object.assign(made, { href: token.href, rel: "noopener noreferrer", target: "_blank" });
    if (token.tokens) appendInline(made, token.tokens, inside);
    else made.append(...inside.nodes(token.text));
    parent.append(made);
  }
}
