// The page: a chat with tokens coloured by their origin, a race against plain decoding, and the rounds of an answer.
// No framework, no build. What the model or the user wrote only ever becomes text nodes.

import { Answer, answerIn } from "./answer.js";
import { Trouble, hasKey, request, stream, useKey } from "./api.js";
import { $, KINDS, button, element, kindOf, wordsOf } from "./parts.js";
import { drawTree, wordsOfRound } from "./tree.js";

const DEMO = "Write a Python function that returns the n-th Fibonacci number.";
const EXAMPLES = [
  "Why is the sky blue?",
  "Write a short story about a fox and a river.",
  "Repeat this text, word for word: The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote " +
    "down the weather in a small blue book.",
];
const MUCH_COPIED = 0.2; // share of an answer copied from an earlier one; from here on a race mentions it

let turns = []; // the conversation
let stop = null; // an AbortController while an answer is streamed
let running = null; // a promise that resolves when the latest answer has ended
let shown = null; // the answer whose figures and rounds are shown
let chosen = null; // the number of the round whose tree is shown

const isPhone = () => getComputedStyle($("messages")).overflowY === "visible"; // the document scrolls

// A turn: what was asked, the answer or the two that race, and what can be done next

class Turn {
  constructor(prompt, racing) {
    this.prompt = prompt;
    this.racing = racing;
    // Graft goes first, so that it cannot copy from the plain answer.
    this.answers = [new Answer("With Graft", true), ...(racing ? [new Answer("Plain decoding", false)] : [])];
    this.box = element("div", racing ? "turn racing" : "turn");
    this.verdict = element("div", "verdict");
    this.verdict.hidden = !racing;
    this.lanes = element("div", "answers");
    this.lanes.append(...this.answers.map((answer) => answer.lane));
    this.ending = element("div", "ending");
    this.box.append(element("div", "user", prompt), this.verdict, this.lanes, this.ending);
    if (!racing) this.answer.title.classList.add("unseen"); // its speed is shown at its end
  }

  get answer() {
    return this.answers[0];
  }

  get messages() {
    const asked = { role: "user", content: this.prompt };
    return this.answer.text ? [asked, { role: "assistant", content: this.answer.text }] : [];
  }

  render() {
    for (const answer of this.answers) answer.render();
    if (this.answers.includes(shown)) markChosen();
    if (this.racing) this.renderVerdict();
  }

  renderVerdict() {
    const longest = Math.max(...this.answers.map((answer) => answer.secondsSoFar), 0.001);
    const laps = element("div", "laps");
    laps.append(...this.answers.map((answer) => lapOf(answer, longest)));
    const [graft, plain] = this.answers;
    const isOver = this.answers.every((answer) => ["stop", "length"].includes(answer.reason)) && plain.text;
    if (!isOver) {
      const words = this.answers.some((answer) => answer.reason === "stopped") ? "The race was stopped" : "The race is on";
      this.verdict.replaceChildren(element("p", "headline", words), laps);
      return;
    }
    const headline = element("p", "headline");
    headline.append(element("b", "", (graft.speed / plain.speed).toFixed(2)), " times as fast with Graft");
    const isSame = plain.text === graft.text;
    const same = element("p", isSame ? "same" : "differs", isSame
      ? "The same text, to the letter."
      : "The texts differ. In low precision two almost equally likely words can change places.");
    const copied = (graft.counts.past ?? 0) / graft.numTokens;
    const memory = copied >= MUCH_COPIED
      ? ` ${Math.round(100 * copied)}% of the answer was copied from an earlier one: a new question would gain less.`
      : "";
    const none = graft.numTokens === (graft.counts.model ?? 0)
      ? " Graft guessed nothing right this time, or found that guessing would not pay: the difference is chance."
      : "";
    const note = "One after the other, Graft first, so that it can copy nothing from the plain answer. Reading the " +
      "question is not counted.";
    this.verdict.replaceChildren(headline, laps, same, element("p", "note", note + memory + none));
  }

  renderEnding() {
    this.ending.replaceChildren();
    const failed = this.answers.find((answer) => answer.reason === "failed");
    const cut = this.answers.filter((answer) => ["length", "stopped"].includes(answer.reason));
    const say = (words, classes = "") => this.ending.append(element("p", classes, words));
    if (failed) {
      const { trouble } = failed;
      say(trouble.message, "trouble error");
      const id = trouble.request ? ` (request ${trouble.request})` : "";
      if (trouble.said) say(`The server says: ${trouble.said}${id}`);
      if (trouble.mayPass) this.ending.append(button("Retry", () => retry(this)));
      if (!this.answer.text) this.ending.append(button("Edit the message", () => edit(this)));
    } else if (cut.length) {
      const { reason, numTokens } = cut[0];
      if (reason === "length") say(`Cut at ${numTokens} tokens, as the settings say.`);
      else say(numTokens ? `Stopped after ${numTokens} tokens.` : "Stopped before the first word.");
      this.ending.append(button("Go on", () => run(this, cut.concat(this.answers.filter((answer) => !answer.reason)))));
    } else if (this.answer.reason && !this.answer.text) {
      say("The answer is empty: the model ended it at once.");
      this.ending.append(button("Ask again", () => retry(this)));
    }
    const { answer } = this;
    if (!answer.rounds.length) return;
    answer.inspect = button("How it was made", () => inspectAnswer(answer), "inspect");
    answer.inspect.setAttribute("aria-pressed", String(answer === shown));
    this.ending.append(answer.inspect);
    if (!this.racing) this.ending.append(element("span", "quiet", `${answer.speed.toFixed(1)} tokens a second`));
  }
}

function lapOf(answer, longest) {
  const lap = element("div", "lap");
  const track = element("span", "track");
  const fill = element("span", "fill");
  fill.style.width = `${(100 * answer.secondsSoFar) / longest}%`;
  track.append(fill);
  const time = answer.secondsSoFar ? `${answer.secondsSoFar.toFixed(1)} s` : "";
  lap.append(element("span", "", answer.speculates ? "Graft" : "Plain"), track, element("span", "time", time));
  return lap;
}

// Asking

function ask(text, racing = $("race").checked) {
  const last = turns.at(-1);
  if (last && !last.answer.pieces.length) forget(last); // it was never answered
  $("welcome").hidden = true;
  const turn = new Turn(text, racing);
  turns.push(turn);
  $("messages").append(turn.box);
  scrollToEnd();
  return run(turn, turn.answers);
}

function retry(turn) {
  const again = turn.answers.filter((answer) => answer.reason !== "length" && (!answer.text || answer.reason !== "stop"));
  again.forEach((answer) => answer.reset());
  return run(turn, again);
}

function edit(turn) {
  forget(turn);
  $("prompt").value = turn.prompt;
  $("prompt").focus();
}

function forget(turn) {
  turns = turns.filter((one) => one !== turn);
  keep();
  turn.box.remove();
  if (turn.answers.includes(shown)) show(turns.at(-1)?.answer ?? null);
  $("welcome").hidden = turns.length > 0;
}

function run(turn, answers) {
  if (!stop) running = answerAll(turn, answers);
  return running;
}

async function answerAll(turn, answers) {
  stop = new AbortController();
  const { signal } = stop;
  $("send").textContent = "Stop";
  turn.ending.replaceChildren();
  $("spoken").replaceChildren();
  show(answers[0]);
  try {
    for (const answer of answers) {
      await follow(turn, answer, signal);
      if (!["stop", "length"].includes(answer.reason)) break;
    }
  } finally { // whatever went wrong, allow the next question
    stop = null;
    $("send").textContent = "Send";
  }
  const follows = isAtEnd();
  turn.render();
  turn.renderEnding();
  speak(turn.answer, true);
  for (const words of turn.box.querySelectorAll(".headline, .ending p")) {
    $("spoken").append(element("p", "", words.textContent));
  }
  keep();
  showFigures();
  if (follows && turn.racing) bringIntoView(turn.verdict, "nearest");
  else if (follows) scrollToEnd();
  const failed = answers.find((answer) => answer.trouble)?.trouble;
  if (failed?.status === 401) askForKey();
  else if ([document.body, $("send")].includes(document.activeElement) && !isPhone()) $("prompt").focus();
}

async function follow(turn, answer, signal) {
  answer.reason = answer.trouble = null;
  answer.dropUnseen();
  answer.body.classList.add("waiting");
  const before = turns.slice(0, turns.indexOf(turn)).flatMap((one) => one.messages);
  const messages = [...before, { role: "user", content: turn.prompt }];
  try {
    const [path, asked] = await askedFor(answer, messages, signal);
    for await (const choice of stream(path, { ...asked, ...settings(answer) }, signal)) {
      answer.take(choice);
      paint(turn, answer);
    }
  } catch (error) {
    if (error.name !== "AbortError" && !(error instanceof Trouble)) throw error;
    answer.end(error instanceof Trouble ? "failed" : "stopped");
    answer.trouble = error instanceof Trouble ? error : null;
  }
  answer.body.classList.remove("waiting");
}

// A cut answer continues from its own tokens. Sampling depends only on the seed and the position, so the result is what
// a higher limit would have given.
async function askedFor(answer, messages, signal) {
  if (!answer.numTokens) return ["v1/chat/completions", { messages }];
  const { tokens } = await (await request("tokenize", { messages }, signal)).json();
  return ["v1/completions", { prompt: [...tokens, ...answer.ids] }];
}

function settings(answer) {
  const seed = parseInt($("seed").value, 10);
  return {
    return_rounds: true,
    speculate: answer.speculates,
    temperature: Number($("temperature").value) || 0,
    max_tokens: Math.max(1, parseInt($("max-tokens").value, 10) || 256),
    ...(Number.isNaN(seed) ? {} : { seed }),
  };
}

let painting = false; // paint at most once a frame
function paint(turn, answer) {
  if (painting) return;
  painting = true;
  requestAnimationFrame(() => {
    painting = false;
    if (!turns.includes(turn)) return;
    const follows = isAtEnd();
    turn.render();
    if (follows) scrollToEnd();
    if (answer === shown) showFigures();
    if (answer === turn.answer) speak(answer);
  });
}

// For screen readers: whole sentences, not tokens

function speak(answer, isOver = false) {
  const fresh = answer.text.slice(answer.spoken);
  const ends = [...fresh.matchAll(/[.!?…:;]["')\]*]*\s+|\n+/g)].map((found) => found.index + found[0].length);
  const upTo = isOver ? fresh.length : ends.at(-1) ?? 0;
  const words = fresh.slice(0, upTo).replace(/[*_`#|]+/g, "").trim();
  if (words) $("spoken").append(element("p", "", words));
  answer.spoken += upTo;
}

// Scrolling: follow the end of a growing text, unless the reader has scrolled away

function pastTheEnd() { // pixels of the messages below the visible part
  if (!isPhone()) return $("messages").scrollHeight - $("messages").scrollTop - $("messages").clientHeight;
  return $("messages").getBoundingClientRect().bottom - $("foot").getBoundingClientRect().top;
}

const isAtEnd = () => pastTheEnd() < 120;

function scrollToEnd() {
  if (isPhone()) window.scrollBy({ top: Math.max(0, pastTheEnd()), behavior: "instant" });
  else $("messages").scrollTop = $("messages").scrollHeight;
}

function bringIntoView(target, block) {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  target.scrollIntoView({ block, behavior: still ? "instant" : "smooth" });
}

// The panel: figures and rounds of one answer

function show(answer) {
  shown = answer;
  chosen = null;
  markChosen();
  for (const one of turns.flatMap((turn) => turn.answers)) {
    one.inspect?.setAttribute("aria-pressed", String(one === answer));
  }
  $("rounds").replaceChildren();
  $("tree").hidden = true;
  showFigures();
}

function inspectAnswer(answer) {
  show(answer);
  if (isPhone()) bringIntoView($("panel-title"), "start");
}

function showFigures() {
  const rounds = shown?.rounds ?? [];
  $("panel").hidden = !rounds.length;
  $("panel-empty").hidden = rounds.length > 0;
  if (!rounds.length) return;
  $("speed").textContent = shown.speed.toFixed(1);
  $("accepted").textContent = shown.meanAccepted.toFixed(2);
  $("rounds-count").textContent = rounds.length;
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
    const row = element("li");
    const percent = `${count} · ${Math.round((100 * count) / shown.numTokens)}%`;
    row.append(element("span", `swatch ${kind}`), element("span", "", words), element("span", "count", percent));
    return row;
  }));
  for (let number = $("rounds").childElementCount; number < rounds.length; number += 1) addRoundBar(number);
}

function addRoundBar(number) {
  const round = shown.rounds[number];
  const bar = button("", () => choose(number), "round");
  bar.tabIndex = number === 0 ? 0 : -1;
  bar.setAttribute("role", "option");
  bar.setAttribute("aria-selected", "false");
  bar.setAttribute("aria-label", `Round ${number + 1}, ${round.new.length} tokens`);
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

function choose(number) {
  const bars = [...$("rounds").children];
  if (!bars[number]) return;
  chosen = number;
  bars.forEach((bar, place) => {
    bar.setAttribute("aria-selected", String(place === number));
    bar.tabIndex = place === number ? 0 : -1;
  });
  if ($("rounds").contains(document.activeElement)) bars[number].focus({ preventScroll: true });
  $("rounds").scrollLeft = bars[number].offsetLeft - $("rounds").offsetLeft - $("rounds").clientWidth / 2;
  markChosen();
  const round = shown.rounds[number];
  $("tree-words").textContent = `Round ${number + 1}: ${wordsOfRound(round)}`;
  $("tree-scroll").replaceChildren(...(round.tokens ? [drawTree(round)] : []));
  $("tree").hidden = false;
  bringIntoView($("tree"), isPhone() ? "start" : "nearest");
}

function markChosen() {
  document.querySelectorAll(".token.chosen").forEach((token) => token.classList.remove("chosen"));
  if (chosen === null) return;
  shown.body.querySelectorAll(`[data-round="${chosen}"]`).forEach((token) => token.classList.add("chosen"));
}

// Storage: the conversation survives a reload and ends with the tab

function keep() {
  const told = turns.map(({ prompt, racing, answers }) => ({
    prompt,
    racing,
    answers: answers.map(({ text, thinks, rounds, seconds, reason }) => ({ text, thinks, rounds, seconds, reason })),
  }));
  const put = () => sessionStorage.setItem("graft.turns", JSON.stringify(told));
  try {
    put();
  } catch { // too much for the browser: keep all texts, but only the trees of the last turn
    for (const { answers } of told.slice(0, -1)) {
      for (const answer of answers) answer.rounds = answer.rounds.map((round) => ({ new: round.new }));
    }
    try {
      put();
    } catch {
      sessionStorage.removeItem("graft.turns");
    }
  }
}

function restore() {
  for (const told of JSON.parse(sessionStorage.getItem("graft.turns") ?? "[]")) {
    if (!told.answers[0].text) continue; // never answered
    const turn = new Turn(told.prompt, told.racing);
    turn.answers.forEach((answer, place) => {
      const { text, thinks, rounds, seconds, reason } = told.answers[place];
      rounds.forEach((round) => answer.addRound(round));
      const ended = reason === "failed" ? "stopped" : reason;
      Object.assign(answer, { text, thinks, seconds, reason: ended, spoken: text.length });
    });
    turns.push(turn);
    $("messages").append(turn.box);
    turn.render();
    turn.renderEnding();
  }
  $("welcome").hidden = turns.length > 0;
  show(turns.at(-1)?.answer ?? null);
  scrollToEnd();
}

// The API key, if the server needs one

function askForKey() {
  $("key-trouble").textContent = hasKey() ? "The one given was not taken." : "";
  $("key-form").hidden = false;
  $("key").focus();
}

$("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
  $("key-form").hidden = true;
  if (!(await nameModel())) return;
  $("key").value = "";
  $("prompt").focus();
  const last = turns.at(-1);
  if (last?.answers.some((answer) => answer.trouble?.status === 401)) retry(last);
});

async function nameModel() {
  try {
    const models = await (await request("v1/models")).json();
    $("model").textContent = models.data[0].id;
    return true;
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    $("model").textContent = error.status === 401 ? "" : error.message;
    if (error.status === 401) askForKey();
    return false;
  }
}

// Mouse and keyboard

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
});

$("rounds").addEventListener("keydown", (event) => {
  const last = shown.rounds.length - 1;
  const now = chosen ?? -1;
  const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: last }[event.key];
  if (next === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  choose(Math.min(Math.max(next, 0), last));
});

$("messages").addEventListener("click", (event) => {
  const token = event.target.closest(".token");
  if (!token) return;
  const answer = answerIn(token.closest(".message"));
  if (answer !== shown) show(answer);
  choose(Number(token.dataset.round));
});

$("back").addEventListener("click", () => {
  bringIntoView(document.querySelector(".token.chosen") ?? shown.body, "center");
});

$("clear").addEventListener("click", async () => {
  stop?.abort();
  await running;
  turns = [];
  keep();
  $("messages").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  show(null);
  if (!isPhone()) $("prompt").focus();
});

$("demo").addEventListener("click", () => ask(DEMO, true));
$("examples").append(...EXAMPLES.map((text) => button(text, () => ask(text))));
$("legend").append(...Object.entries(KINDS).map(([kind, { all }]) => {
  const row = element("li");
  row.append(element("span", `swatch ${kind}`), element("span", "", all));
  return row;
}));
restore();
nameModel();
if (!isPhone()) $("prompt").focus();
