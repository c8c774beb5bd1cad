// The panel: figures of one answer, its rounds as bars, and the tree of one round.

import { $, KINDS, button, counted, element, kindOf, swatchRow, wordsOf } from "./parts.js";
import { drawTree, hasTree, wordsOfRound } from "./tree.js";
import { bringIntoView, isPhone } from "./view.js";

const PAUSE = 900; // milliseconds between trees while an answer comes, so that each can be read

let shown = null; // the answer whose figures and rounds are shown
let chosen = null; // the number of the round whose tree is shown
let isFollowing = true; // whether the newest tree is shown; until the reader chooses a round
let drawnAt = 0;

export const isShown = (answer) => answer === shown;

export function show(answer) {
  if (shown) shown.inspect?.setAttribute("aria-pressed", "false");
  answer?.inspect?.setAttribute("aria-pressed", "true");
  [shown, chosen, isFollowing, drawnAt] = [answer, null, true, 0];
  markChosen();
  place();
  $("rounds").replaceChildren();
  $("tree").hidden = true;
  showFigures();
}

// Beside the conversation; on a phone, below the answer it speaks of
function place() {
  const home = (isPhone() && shown?.body.closest(".turn")) || document.querySelector("aside");
  if ($("how").parentElement !== home) home.append($("how"));
}

export function inspectAnswer(answer) {
  show(answer);
  if (isPhone()) bringIntoView($("panel-title"), "start");
}

export function showFigures() {
  const rounds = shown?.rounds ?? [];
  $("panel").hidden = !rounds.length;
  $("panel-empty").hidden = rounds.length > 0;
  if (!rounds.length) return;
  $("speed").textContent = shown.speed ? shown.speed.toFixed(1) : "–";
  $("accepted").textContent = shown.meanAccepted.toFixed(2);
  $("rounds-count").textContent = rounds.length;
  showShares();
  for (let number = $("rounds").childElementCount; number < rounds.length; number += 1) addBar(number);
  followNewest();
  showSteps();
}

function showShares() {
  const shares = new Map(); // by words: {kind, count}
  const kinds = Object.fromEntries(Object.keys(KINDS).map((kind) => [kind, 0]));
  for (const [origin, count] of Object.entries(shown.counts)) {
    kinds[kindOf(origin)] += count;
    const words = wordsOf(origin);
    shares.set(words, { kind: kindOf(origin), count: count + (shares.get(words)?.count ?? 0) });
  }
  $("bar").replaceChildren(...Object.entries(kinds).map(([kind, count]) => {
    const part = element("span", kind);
    part.style.flexGrow = count;
    return part;
  }));
  const order = Object.keys(KINDS);
  const sorted = [...shares].sort(([, a], [, b]) => order.indexOf(a.kind) - order.indexOf(b.kind) || b.count - a.count);
  $("shares").replaceChildren(...sorted.map(([words, { kind, count }]) => {
    const row = swatchRow(kind, words);
    row.append(element("span", "count", `${count} · ${Math.round((100 * count) / shown.numTokens)}%`));
    return row;
  }));
}

// The bars of the rounds

function addBar(number) {
  const round = shown.rounds[number];
  const bar = button("", () => choose(number), "round");
  bar.tabIndex = number === 0 ? 0 : -1;
  bar.setAttribute("role", "option");
  bar.setAttribute("aria-selected", "false");
  bar.setAttribute("aria-label", `Round ${number + 1}, ${counted(round.new.length, "token")}: ${originsOf(round)}`);
  if (round.new.length > 12) bar.classList.add("high");
  for (const piece of round.new) {
    const block = element("i", kindOf(piece.origin));
    block.style.height = `${Math.min(9, 110 / round.new.length)}px`; // limits the height of a very good round
    bar.append(block);
  }
  const box = $("rounds");
  const atEnd = box.scrollWidth - box.scrollLeft - box.clientWidth < 40;
  box.append(bar);
  if (atEnd) box.scrollLeft = box.scrollWidth;
}

function originsOf(round) {
  const counts = {};
  for (const { origin } of round.new) counts[wordsOf(origin)] = (counts[wordsOf(origin)] ?? 0) + 1;
  return Object.entries(counts).map(([words, count]) => `${count} ${words}`).join(", ");
}

// Shows that bars lie outside of the visible part, and on which side.
function showScrollCue() {
  const box = $("rounds");
  const hidden = box.scrollWidth - box.clientWidth;
  $("scroll-cue").hidden = hidden < 4;
  box.classList.toggle("more-left", box.scrollLeft > 4);
  box.classList.toggle("more-right", hidden - box.scrollLeft > 4);
}

function showSteps() {
  const last = shown.rounds.length - 1;
  $("step").textContent = chosen === null ? "" : `Round ${chosen + 1} of ${last + 1}`;
  $("earlier").disabled = !(chosen > 0);
  $("later").disabled = chosen === null || chosen >= last;
  $("newest").hidden = $("back").hidden = isFollowing;
  showScrollCue();
}

// The tree of a round

function newestTree() {
  const newest = shown.rounds.findLastIndex(hasTree);
  return newest < 0 ? shown.rounds.length - 1 : newest;
}

function followNewest() {
  const now = performance.now();
  if (!isFollowing || (shown.reason === null && now - drawnAt < PAUSE)) return;
  const newest = newestTree();
  if (newest === chosen) return;
  drawnAt = now;
  showRound(newest);
}

// A round that the reader chose stays, even while new rounds come.
export function choose(number) {
  if (!shown?.rounds[number]) return;
  isFollowing = false;
  showRound(number);
  const box = $("rounds");
  box.scrollLeft = box.children[number].offsetLeft - box.offsetLeft - box.clientWidth / 2;
  showSteps();
}

function showRound(number) {
  const bars = [...$("rounds").children];
  chosen = number;
  bars.forEach((bar, place) => {
    bar.setAttribute("aria-selected", String(place === number));
    bar.tabIndex = place === number ? 0 : -1;
  });
  if ($("rounds").contains(document.activeElement)) bars[number].focus({ preventScroll: true });
  markChosen();
  const round = shown.rounds[number];
  $("tree-words").textContent = wordsOfRound(round);
  const tree = round.tokens ? drawTree(round) : null;
  $("tree-scroll").replaceChildren(...(tree ? [tree.drawing, tree.list] : []));
  $("tree-scroll").hidden = tree === null;
  const leftOut = tree?.numLeftOut ?? 0;
  $("tree-more").textContent = leftOut ? `${counted(leftOut, "unlikely guess", "unlikely guesses")} not drawn.` : "";
  $("tree").hidden = false;
}

export function markChosen() {
  document.querySelectorAll(".token.chosen").forEach((token) => token.classList.remove("chosen"));
  if (chosen === null) return;
  shown.body.querySelectorAll(`[data-round="${chosen}"]`).forEach((token) => token.classList.add("chosen"));
}

// A piece of an answer's text was chosen.
export function chooseToken(answer, number) {
  if (answer !== shown) show(answer);
  choose(number);
  bringIntoView(isPhone() ? $("steps") : $("tree"), isPhone() ? "start" : "nearest");
}

// Mouse and keyboard

$("rounds").addEventListener("keydown", (event) => {
  const last = shown.rounds.length - 1;
  const now = chosen ?? -1;
  const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: last }[event.key];
  if (next === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  choose(Math.min(Math.max(next, 0), last));
});
$("rounds").addEventListener("scroll", showScrollCue);
$("earlier").addEventListener("click", () => choose(chosen - 1));
$("later").addEventListener("click", () => choose(chosen + 1));
$("newest").addEventListener("click", () => {
  choose(newestTree());
  isFollowing = true;
  showSteps();
  $("later").focus();
});
$("back").addEventListener("click", () => {
  bringIntoView(document.querySelector(".token.chosen") ?? shown.body, "center");
});
matchMedia("(max-width: 800px)").addEventListener("change", () => {
  place();
  showScrollCue();
});
