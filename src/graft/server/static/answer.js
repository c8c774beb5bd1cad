// One answer: its tokens as they come, the element that shows them, and how it ended.

import { showMarkdown } from "./markdown.js";
import { element, kindOf, wordsOf } from "./parts.js";

const SOON = 0.3; // seconds of decoding, before which a speed would mean nothing

const answerOf = new WeakMap(); // by the element that holds its text
export const answerIn = (body) => answerOf.get(body);

export class Answer {
  constructor(name, speculates) {
    this.name = name;
    this.speculates = speculates;
    this.title = element("h3", "", name);
    this.body = element("div", "message");
    this.lane = element("div", "lane");
    this.lane.append(this.title, this.body);
    answerOf.set(this.body, this);
    this.reset();
  }

  reset() {
    this.rounds = [];
    this.pieces = []; // {text, at, origin, round}, where `at` is its place in the answer
    this.ids = []; // of its tokens
    this.counts = {}; // tokens by origin
    this.text = ""; // sent back as history: without the reasoning, which the pieces include
    this.thinks = false;
    this.seconds = 0; // of decoding alone
    this.since = null; // when the current stream brought its first token
    this.reason = null; // stop, length, stopped or failed; null: not ended
    this.trouble = null;
    this.spoken = 0; // characters read out
    this.state = "idle"; // then "next", while another answer goes first, then "running"
    this.body.replaceChildren();
  }

  take(choice) {
    this.since ??= performance.now();
    this.text += choice.delta?.content ?? choice.text ?? "";
    this.thinks ||= Boolean(choice.delta?.reasoning_content);
    for (const round of choice.rounds ?? []) this.addRound(round);
    if (!choice.finish_reason) return;
    this.reason = choice.finish_reason;
    this.seconds += choice.speculation.decode_seconds;
    this.since = null;
  }

  addRound(round) {
    const number = this.rounds.push(round) - 1;
    for (const { id, text, origin } of round.new) {
      this.ids.push(id);
      this.counts[origin] = (this.counts[origin] ?? 0) + 1;
      if (!text) continue;
      const last = this.pieces.at(-1);
      this.pieces.push({ text, at: last ? last.at + last.text.length : 0, origin, round: number });
    }
  }

  end(reason) {
    this.reason = reason;
    if (this.since !== null) this.seconds += (performance.now() - this.since) / 1000;
    this.since = null;
  }

  // Everything that a later visit needs
  get kept() {
    const { text, thinks, rounds, seconds, reason } = this;
    return { text, thinks, rounds, seconds, reason };
  }

  restore({ text, thinks, rounds, seconds, reason }) {
    rounds.forEach((round) => this.addRound(round));
    const wasCut = reason === "failed" || (reason === null && rounds.length > 0); // by an error, or by leaving the page
    Object.assign(this, { text, thinks, seconds, reason: wasCut ? "stopped" : reason, spoken: text.length });
  }

  // Prepares to continue: drop last tokens that are an incomplete character, which nobody has seen.
  dropUnseen() {
    while (this.rounds.length && !this.rounds.at(-1).new.at(-1)?.text) {
      const last = this.rounds.at(-1).new.pop();
      if (last) this.counts[last.origin] -= 1;
      if (last) this.ids.pop();
      else this.rounds.pop();
    }
    if (!this.thinks) this.text = this.pieces.map((piece) => piece.text).join("");
  }

  // What stands where there is no text
  get placeholder() {
    if (this.state === "running") return "Thinking…";
    if (this.state === "next") return "Starts when Graft has finished.";
    return this.reason === null ? "Not started." : "No text.";
  }

  render() {
    const text = this.pieces.map((piece) => piece.text).join("");
    if (text) showMarkdown(this.body, text, (part, places) => this.spans(part, places));
    else this.body.replaceChildren(element("p", `placeholder ${this.state}`, this.placeholder));
    const speed = this.speed ? ` · ${this.speed.toFixed(1)} tokens a second` : "";
    this.title.textContent = `${this.name}${speed}`;
  }

  // One span for each token of a text. places: where its characters stand in the answer
  spans(text, places) {
    const spans = [];
    let from = 0;
    while (from < text.length) {
      const piece = this.pieceAt(places[from]);
      let to = from + 1;
      while (to < text.length && places[to] < piece.at + piece.text.length) to += 1;
      spans.push(tokenOf(text.slice(from, to), piece));
      from = to;
    }
    return spans;
  }

  pieceAt(place) {
    let [low, high] = [0, this.pieces.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.pieces[middle].at <= place) low = middle;
      else high = middle - 1;
    }
    return this.pieces[low];
  }

  get numTokens() {
    return this.ids.length;
  }

  get secondsSoFar() {
    return this.seconds + (this.since === null ? 0 : (performance.now() - this.since) / 1000);
  }

  get speed() {
    const seconds = this.secondsSoFar;
    const isTooEarly = seconds < SOON && this.reason === null;
    return isTooEarly || seconds === 0 ? 0 : this.numTokens / seconds;
  }

  get meanAccepted() {
    const own = this.counts.model ?? 0;
    return this.rounds.length ? 1 + (this.numTokens - own) / this.rounds.length : 0;
  }
}

function tokenOf(text, { origin, round }) {
  const span = element("span", `token ${kindOf(origin)}`, text);
  span.title = `${wordsOf(origin)}, round ${round + 1}`;
  span.dataset.round = round;
  return span;
}
