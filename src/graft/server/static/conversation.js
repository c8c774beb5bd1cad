// The conversation: asking, following the streams of answers, and keeping all of it.

import { Trouble, request, stream } from "./api.js";
import { currentChat, forgetAllChats, forgetChat, keepChat, newChatId, readChat, useChat } from "./chats.js";
import { isShown, show, showFigures } from "./panel.js";
import { $, element } from "./parts.js";
import { chosenSettings, maxTokens } from "./settings.js";
import { Turn } from "./turn.js";
import { bringIntoView, isAtEnd, isPhone, scrollToEnd } from "./view.js";

const ENDED = ["stop", "length"];

let turns = [];
let stopping = null; // an AbortController while an answer is streamed
let running = null; // a promise that resolves when the latest answer has ended

export const isAnswering = () => stopping !== null;
export const stop = () => stopping?.abort();
export const lastTurn = () => turns.at(-1);

const actions = { goOn, retry, regenerate, edit };

// Asking

export function ask(text, racing = $("race").checked) {
  if (isAnswering()) return running;
  const last = turns.at(-1);
  if (last && !last.answer.pieces.length) drop(last); // it was never answered
  if (!turns.length) useChat(newChatId());
  $("welcome").hidden = true;
  const turn = new Turn(text, racing, chosenSettings(), actions);
  turns.push(turn);
  $("messages").append(turn.box);
  scrollToEnd();
  return run(turn, turn.answers);
}

function goOn(turn) {
  const cut = turn.answers.filter((answer) => ["length", "stopped"].includes(answer.reason));
  return run(turn, cut.concat(turn.answers.filter((answer) => !answer.reason)));
}

export function retry(turn) {
  const isDone = ({ reason, text }) => reason === "length" || (reason === "stop" && text);
  const again = turn.answers.filter((answer) => !isDone(answer));
  again.forEach((answer) => answer.reset());
  return run(turn, again);
}

// Another answer, with the current settings. Each try has its own seed.
function regenerate(turn) {
  if (isAnswering()) return running;
  turn.settings = chosenSettings();
  if (turn.settings.sampling.seed !== undefined) turn.settings.sampling.seed += turn.numTries;
  turn.numTries += 1;
  turn.answers.forEach((answer) => answer.reset());
  return run(turn, turn.answers);
}

function edit(turn) {
  drop(turn);
  $("prompt").value = turn.prompt;
  $("prompt").focus();
}

function drop(turn) {
  turns = turns.filter((one) => one !== turn);
  keep();
  if (turn.answers.some(isShown)) show(turns.at(-1)?.answer ?? null);
  turn.box.remove();
  $("welcome").hidden = turns.length > 0;
}

// Following the answers

function run(turn, answers) {
  if (!isAnswering()) running = answerAll(turn, answers);
  return running;
}

async function answerAll(turn, answers) {
  stopping = new AbortController();
  const { signal } = stopping;
  $("send").textContent = "Stop";
  turn.ending.replaceChildren();
  $("spoken").replaceChildren(element("p", "", "Thinking…"));
  for (const answer of answers) answer.state = "next";
  show(answers[0]);
  try {
    for (const answer of answers) {
      await follow(turn, answer, signal);
      if (!ENDED.includes(answer.reason)) break;
    }
  } finally { // whatever went wrong, allow the next question
    stopping = null;
    $("send").textContent = "Send";
    for (const answer of answers) answer.state = "idle";
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
  document.dispatchEvent(new CustomEvent("answered", { detail: turn }));
}

async function follow(turn, answer, signal) {
  answer.reason = answer.trouble = null;
  answer.state = "running";
  answer.dropUnseen();
  answer.body.classList.add("waiting");
  turn.render();
  const before = turns.slice(0, turns.indexOf(turn)).flatMap((one) => one.messages);
  const { system, sampling } = turn.settings;
  const opening = system ? [{ role: "system", content: system }] : [];
  const messages = [...opening, ...before, { role: "user", content: turn.prompt }];
  const wishes = { ...sampling, max_tokens: maxTokens(), return_rounds: true, speculate: answer.speculates };
  try {
    const [path, asked] = await askedFor(answer, messages, signal);
    for await (const choice of stream(path, { ...asked, ...wishes }, signal)) {
      answer.take(choice);
      paint(turn, answer);
    }
  } catch (error) {
    if (error.name !== "AbortError" && !(error instanceof Trouble)) throw error;
    answer.end(error instanceof Trouble ? "failed" : "stopped");
    answer.trouble = error instanceof Trouble ? error : null;
  } finally {
    answer.state = "idle";
    answer.body.classList.remove("waiting");
  }
}

// A cut answer continues from its own tokens. Sampling depends only on the seed and the position, so the result is what
// a higher limit would have given.
async function askedFor(answer, messages, signal) {
  if (!answer.numTokens) return ["v1/chat/completions", { messages }];
  const { tokens } = await (await request("tokenize", { messages }, signal)).json();
  return ["v1/completions", { prompt: [...tokens, ...answer.ids] }];
}

let painting = false; // paint at most once a frame
function paint(turn, answer) {
  if (painting) return;
  painting = true;
  requestAnimationFrame(() => {
    painting = false;
    if (!turns.includes(turn) || !isAnswering()) return; // its end was painted already, and may be scrolling
    const follows = isAtEnd();
    turn.render();
    if (isShown(answer)) showFigures();
    if (follows) scrollToEnd();
    if (answer === turn.answer) speak(answer);
  });
}

// For screen readers: whole sentences, not tokens
function speak(answer, isOver = false) {
  if (answer.pieces.length && answer.spoken === 0) $("spoken").replaceChildren(); // no longer thinking
  const fresh = answer.text.slice(answer.spoken);
  const ends = [...fresh.matchAll(/[.!?…:;]["')\]*]*\s+|\n+/g)].map((found) => found.index + found[0].length);
  const upTo = isOver ? fresh.length : ends.at(-1) ?? 0;
  const words = fresh.slice(0, upTo).replace(/[*_`#|]+/g, "").trim();
  if (words) $("spoken").append(element("p", "", words));
  answer.spoken += upTo;
}

// Keeping conversations, opening them again, and forgetting them

export function keep() {
  const id = currentChat();
  if (id) keepChat(id, turns.filter((turn) => turn.answer.pieces.length).map((turn) => turn.kept));
}

async function leave() {
  stop();
  await running?.catch(() => {}); // it has been reported where it happened
  turns = [];
  show(null);
  $("messages").replaceChildren($("welcome"));
  $("welcome").hidden = false;
  if (isPhone()) window.scrollTo({ top: 0, behavior: "instant" });
}

export async function newChat() {
  await leave();
  useChat("");
  if (!isPhone()) $("prompt").focus();
}

export async function openChat(id) {
  await leave();
  useChat(id);
  restore();
}

export async function forget(id) {
  if (id === currentChat()) await newChat();
  forgetChat(id);
}

export async function forgetAll() {
  await newChat();
  forgetAllChats();
}

// Shows the conversation that this tab was about, if it is still kept.
export function restore() {
  for (const told of readChat(currentChat())?.turns ?? []) {
    const turn = new Turn(told.prompt, told.racing, told.settings, actions);
    turn.restore(told);
    turns.push(turn);
    $("messages").append(turn.box);
  }
  $("welcome").hidden = turns.length > 0;
  show(turns.at(-1)?.answer ?? null);
  if (turns.length) scrollToEnd();
}
