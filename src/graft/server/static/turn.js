// A turn: what was asked, the answer or the two that race, and what can be done next.

import { Answer } from "./answer.js";
import { inspectAnswer, isShown, markChosen } from "./panel.js";
import { button, counted, element } from "./parts.js";

const MUCH_COPIED = 0.2; // share of an answer copied from an earlier one; from here on a race mentions it
const ENDED = ["stop", "length"];

export class Turn {
  // settings: system prompt and sampling. actions: {goOn, retry, regenerate, edit}, called with the turn
  constructor(prompt, racing, settings, actions) {
    Object.assign(this, { prompt, racing, settings, actions });
    this.numTries = 1;
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

  get kept() {
    const { prompt, racing, settings, numTries, answers } = this;
    return { prompt, racing, settings, numTries, answers: answers.map((answer) => answer.kept) };
  }

  restore({ numTries, answers }) {
    this.numTries = numTries;
    this.answers.forEach((answer, place) => answer.restore(answers[place]));
    this.render();
    this.renderEnding();
  }

  render() {
    for (const answer of this.answers) answer.render();
    if (this.answers.some(isShown)) markChosen();
    if (this.racing) this.renderVerdict();
  }

  renderVerdict() {
    const longest = Math.max(...this.answers.map((answer) => answer.secondsSoFar), 0.001);
    const laps = element("div", "laps");
    laps.append(...this.answers.map((answer) => lapOf(answer, longest)));
    const [graft, plain] = this.answers;
    const isOver = this.answers.every((answer) => ENDED.includes(answer.reason)) && plain.text;
    if (!isOver) {
      const isOn = this.answers.some((answer) => answer.state === "running");
      this.verdict.replaceChildren(element("p", "headline", isOn ? "The race is on" : "The race was stopped"), laps);
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
    this.renderOutcome();
    const { answer } = this;
    if (!answer.rounds.length) return;
    answer.inspect = button("How it was made", () => inspectAnswer(answer), "inspect");
    answer.inspect.setAttribute("aria-pressed", String(isShown(answer)));
    this.ending.append(answer.inspect);
    this.ending.append(button("Regenerate", () => this.actions.regenerate(this), "regenerate"));
    if (answer.text) this.ending.append(copyButton(answer));
    if (!this.racing) this.ending.append(element("span", "quiet", `${answer.speed.toFixed(1)} tokens a second`));
  }

  // What went wrong or was cut, and what can be done about it
  renderOutcome() {
    const failed = this.answers.find((answer) => answer.reason === "failed");
    const cut = this.answers.find((answer) => ["length", "stopped"].includes(answer.reason));
    const say = (words, classes = "") => this.ending.append(element("p", classes, words));
    const offer = (words, action) => this.ending.append(button(words, () => action(this)));
    const { goOn, retry, edit } = this.actions;
    if (failed) {
      const { trouble } = failed;
      say(trouble.message, "trouble error");
      const id = trouble.request ? ` (request ${trouble.request})` : "";
      if (trouble.said) say(`The server says: ${trouble.said}${id}`);
      if (trouble.mayPass) offer("Retry", retry);
      if (!this.answer.text) offer("Edit the message", edit);
    } else if (cut) {
      const { reason, numTokens } = cut;
      if (reason === "length") say(`Cut at ${counted(numTokens, "token")}, as the settings say.`);
      else say(numTokens ? `Stopped after ${counted(numTokens, "token")}.` : "Stopped before the first word.");
      offer("Go on", goOn);
    } else if (this.answer.reason && !this.answer.text) {
      say("The answer is empty: the model ended it at once.");
      offer("Ask again", retry);
    }
    if (this.numTries > 1 && this.settings.sampling.temperature === 0 && !failed) {
      say("At temperature 0 the answer is always the same. Raise it in the settings to get another.");
    }
  }
}

function lapOf(answer, longest) {
  const lap = element("div", "lap");
  const track = element("span", "track");
  const fill = element("span", "fill");
  fill.style.width = `${(100 * answer.secondsSoFar) / longest}%`;
  track.append(fill);
  const waits = { running: "reading", next: "waits" }[answer.state] ?? "–";
  const time = answer.secondsSoFar ? `${answer.secondsSoFar.toFixed(1)} s` : waits;
  lap.append(element("span", "", answer.speculates ? "Graft" : "Plain"), track, element("span", "time", time));
  return lap;
}

function copyButton(answer) {
  const made = button("Copy", async () => {
    made.textContent = (await copy(answer.text)) ? "Copied" : "Copying is not allowed here";
    made.focus();
    setTimeout(() => (made.textContent = "Copy"), 2000);
  }, "copy");
  return made;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // the page did not come over HTTPS or from this machine, or the browser forbids it
    const box = element("textarea", "unseen");
    box.value = text;
    document.body.append(box);
    box.select();
    const done = document.execCommand("copy");
    box.remove();
    return done;
  }
}
