// Markdown as elements. Only text nodes hold what was written, and the caller makes those, told where in the source each
// character stands: so every token keeps its colour. HTML is shown as it is spelt, and only links to the web are links.

import { element } from "./parts.js";

// No part of an expression here may match what the part beside it does, or a long line would take quadratic time.
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(?=\S)/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const THINK = /^\s*<think>/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const ROW = /^\s*\|.*\|\s*$/;
const MAX_DEPTH = 8; // of quotes and lists in each other

// Shows a text in a box. write(text, places): nodes for a text whose characters stand at these places of the source.
// Blocks that are there already stay: of a growing text only the last one is made anew.
export function showMarkdown(box, source, write) {
  const blocks = blocksOf(linesOf(source));
  const wanted = blocks.map((block) => `${block.kind} ${block.from} ${block.to}`);
  let same = 0;
  while (same < wanted.length && box.children[same]?.dataset.block === wanted[same]) same += 1;
  while (box.children.length > same) box.lastElementChild.remove();
  for (let place = same; place < blocks.length; place += 1) {
    const made = build(blocks[place], write);
    made.dataset.block = wanted[place];
    box.append(made);
  }
}

// Lines: {text, at}, where `at` is the place of the first character in the source

function linesOf(source) {
  let at = 0;
  return source.split("\n").map((text) => {
    const line = { text, at };
    at += text.length + 1;
    return line;
  });
}

const cut = (line, from, to = line.text.length) => ({ text: line.text.slice(from, to), at: line.at + from });
const isBlank = (line) => !line.text.trim();
const indentOf = (line) => line.text.length - line.text.trimStart().length;

// Blocks: {kind, from, to, ...}, each of some lines

function blocksOf(lines, depth = 0) {
  const blocks = [];
  const textBehind = textBehindOf(lines);
  let level = 3; // the page's own headings go so deep; none is skipped below
  let next = 0;
  const takeWhile = (fits) => {
    const first = next;
    while (next < lines.length && fits(lines[next], next)) next += 1;
    return lines.slice(first, next);
  };
  while (next < lines.length) {
    const line = lines[next];
    const first = next;
    let block;
    if (isBlank(line)) {
      next += 1;
      continue;
    } else if (FENCE.test(line.text)) {
      next += 1;
      const fence = line.text.match(FENCE)[1];
      const closes = ({ text }) => text.trim().startsWith(fence) && !text.trim().replaceAll(fence[0], "");
      block = { kind: "code", lines: takeWhile((one) => !closes(one)) };
      next += 1; // the closing fence, if it has come
    } else if (HEADING.test(line.text)) {
      const [before, marks] = line.text.match(HEADING);
      level = Math.min(level + 1, marks.length + 3, 6);
      block = { kind: `h${level}`, lines: [cut(line, before.length)] };
      next += 1;
    } else if (RULE.test(line.text)) {
      block = { kind: "hr" };
      next += 1;
    } else if (depth < MAX_DEPTH && THINK.test(line.text)) { // what some models write before they answer
      const thought = takeWhile((one, at) => at === first || !lines[at - 1].text.includes("</think>"));
      thought[0] = cut(line, line.text.indexOf(">") + 1);
      block = { kind: "blockquote", blocks: blocksOf(thought, depth + 1) };
    } else if (depth < MAX_DEPTH && QUOTE.test(line.text)) {
      const quoted = takeWhile((one) => QUOTE.test(one.text)).map((one) => cut(one, one.text.match(QUOTE)[0].length));
      block = { kind: "blockquote", blocks: blocksOf(quoted, depth + 1) };
    } else if (depth < MAX_DEPTH && ITEM.test(line.text)) {
      const starts = (one) => ITEM.test(one.text) && !RULE.test(one.text);
      const isOurs = (one, at) => starts(one) || (isBlank(one) ? goesOn(textBehind[at]) : indentOf(one) > 0 ||
        (!isBlank(lines[at - 1]) && !beginsBlock(lines, at)));
      block = listOf(takeWhile(isOurs), depth + 1);
    } else if (beginsTable(lines, next)) {
      const rows = takeWhile((one) => ROW.test(one.text));
      block = { kind: "table", rows: rows.filter((one, place) => place !== 1).map(cellsOf) };
    } else {
      next += 1;
      takeWhile((one, at) => !isBlank(one) && !beginsBlock(lines, at));
      block = { kind: "p", lines: lines.slice(first, next) };
    }
    const last = lines[Math.min(next, lines.length) - 1];
    blocks.push({ ...block, from: line.at, to: last.at + last.text.length });
  }
  return blocks;
}

const beginsBlock = (lines, at) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((one) => one.test(lines[at].text)) ||
  beginsTable(lines, at);

function beginsTable(lines, at) {
  const second = lines[at + 1]?.text ?? "";
  return ROW.test(lines[at].text) && ROW.test(second) && /^[-:|\s]+$/.test(second) && second.includes("-");
}

// Of each line the first one from it on that is not blank
function textBehindOf(lines) {
  const found = new Array(lines.length);
  for (let at = lines.length - 1; at >= 0; at -= 1) found[at] = isBlank(lines[at]) ? found[at + 1] : lines[at];
  return found;
}

// After blank lines a list goes on with a further item, or with what is indented.
const goesOn = (later) => later !== undefined && (ITEM.test(later.text) || indentOf(later) > 1);

function listOf(lines, depth) {
  const outer = indentOf(lines[0]);
  const number = parseInt(lines[0].text.trim(), 10);
  const items = [];
  for (const line of lines) {
    const found = line.text.match(ITEM);
    if (found && found[1].length < outer + 2) {
      items.push({ width: found[0].length, lines: [cut(line, found[0].length)] });
    } else {
      items.at(-1).lines.push(cut(line, Math.min(indentOf(line), items.at(-1).width)));
    }
  }
  const blocks = items.map((item) => blocksOf(item.lines, depth));
  return Number.isNaN(number) ? { kind: "ul", items: blocks } : { kind: "ol", start: number, items: blocks };
}

function cellsOf(line) {
  const cells = [];
  for (const found of line.text.matchAll(/\|([^|]*)(?=\|)/g)) {
    const from = found.index + 1 + indentOf({ text: found[1] });
    cells.push(cut(line, from, from + found[1].trim().length));
  }
  return cells;
}

function build(block, write) {
  const made = element(block.kind === "code" ? "pre" : block.kind);
  if (block.kind === "code") {
    const code = element("code");
    code.append(...write(...joined(block.lines)));
    made.append(code);
    made.tabIndex = 0; // long lines scroll
  } else if (block.lines) {
    made.append(...inline(...joined(block.lines), write));
  } else if (block.blocks) {
    made.append(...block.blocks.map((one) => build(one, write)));
  } else if (block.items) {
    if (block.kind === "ol") made.start = block.start;
    for (const blocks of block.items) {
      const item = element("li");
      for (const one of blocks) {
        if (one.kind === "p") item.append(...inline(...joined(one.lines), write));
        else item.append(build(one, write));
      }
      made.append(item);
    }
  } else if (block.rows) {
    block.rows.forEach((cells, place) => {
      const row = element("tr");
      for (const cell of cells) {
        const box = element(place === 0 ? "th" : "td");
        box.append(...inline(...joined([cell]), write));
        row.append(box);
      }
      made.append(row);
    });
  }
  return made;
}

function joined(lines) {
  const text = lines.map((line) => line.text).join("\n");
  const places = lines.flatMap((line) => Array.from({ length: line.text.length + 1 }, (_, i) => line.at + i));
  return [text, places];
}

// What stands in a line: the first mark that fits, and the same again in what it holds and in what follows
// (each reaches so far and no further: marks without an end must not be searched for through the whole text, again
// and again).
const MARKS = [
  ["code", /(?<!`)(`+)(?!`)([^]{0,400}?[^`])\1(?!`)/dg],
  ["strong", /(\*\*)(?=\S)([^]{0,400}?\S)\*\*(?!\*)/dg],
  ["strong", /(?<!\w)(__)(?=\S)([^]{0,400}?\S)__(?!\w)/dg],
  ["em", /(\*)(?=[^\s*])([^*]{0,400}[^\s*])\*(?![\w*])/dg],
  ["em", /(?<!\w)(_)(?=[^\s_])([^_]{0,400}[^\s_])_(?!\w)/dg],
  ["del", /(~~)(?=\S)([^]{0,400}?\S)~~/dg],
  ["a", /(\[)([^\][]{1,400})\]\((https?:\/\/[^\s()]+)\)/dg],
];

function inline(text, places, write) {
  const made = [];
  const coming = MARKS.map(([kind]) => ({ kind, found: { index: -1 } })); // of each mark, where it is found next
  let done = 0; // characters
  while (done < text.length) {
    coming.forEach((one, place) => {
      if (!one.found || one.found.index >= done) return;
      const pattern = MARKS[place][1];
      pattern.lastIndex = done;
      one.found = pattern.exec(text);
    });
    const first = coming.filter((one) => one.found).sort((a, b) => a.found.index - b.found.index)[0];
    const start = first ? first.found.index : text.length;
    if (start > done) made.push(...write(text.slice(done, start), places.slice(done, start)));
    if (!first) break;
    const { kind, found } = first;
    const [from, to] = found.indices[2];
    const inner = [text.slice(from, to), places.slice(from, to)];
    const box = element(kind);
    box.append(...(kind === "code" ? write(...inner) : inline(...inner, write)));
    if (kind === "a") Object.assign(box, { href: found[3], rel: "noopener noreferrer", target: "_blank" });
    made.push(box);
    done = start + found[0].length;
  }
  return made;
}
