// The page: a chat with tokens coloured by their origin, a race against plain decoding, and the rounds of an answer.
// No framework, no build. What the model or the user wrote only ever becomes text nodes. Here it is put together.

import { answerIn } from "./answer.js";
import { Trouble, hasKey, request, useKey } from "./api.js";
import { currentChat, listChats } from "./chats.js";
import {
  ask, forget, forgetAll, isAnswering, keep, lastTurn, newChat, openChat, restore, retry, stop,
} from "./conversation.js";
import { chooseToken } from "./panel.js";
import { $, KINDS, button, counted, element, swatchRow } from "./parts.js";
import { forgetSettings, keepSettings, restoreSettings } from "./settings.js";
import { SAMPLE, drawTree } from "./tree.js";
import { isPhone } from "./view.js";

const DEMO = "Write a Python function that returns the n-th Fibonacci number.";
const EXAMPLES = [
  "Why is the sky blue?",
  "Write a short story about a fox and a river.",
  "Repeat this text, word for word: The lighthouse keeper climbed the stairs every evening, lit the lamp, and wrote " +
    "down the weather in a small blue book.",
];

// The API key, if the server needs one

function askForKey() {
  $("key-trouble").textContent = hasKey() ? "The key given was not accepted." : "";
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
  const last = lastTurn();
  if (last && wasRefused(last)) retry(last);
});

const wasRefused = (turn) => turn.answers.some((answer) => answer.trouble?.status === 401);

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

// Asking

document.addEventListener("answered", ({ detail: turn }) => {
  if (wasRefused(turn)) askForKey();
  else if ([document.body, $("send")].includes(document.activeElement) && !isPhone()) $("prompt").focus();
});

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (isAnswering()) {
    stop();
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
    if (!isAnswering()) $("ask").requestSubmit();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector(":popover-open")) stop();
});

$("messages").addEventListener("click", (event) => {
  const token = event.target.closest(".token");
  if (token) chooseToken(answerIn(token.closest(".message")), Number(token.dataset.round));
});

$("demo").addEventListener("click", () => ask(DEMO, true));
$("examples").append(...EXAMPLES.map((text) => button(text, () => ask(text))));

// The conversations that are kept

function listKept() {
  const chats = listChats();
  $("chat-list").replaceChildren(...chats.map(chatRow));
  $("no-chats").hidden = chats.length > 0;
  $("kept").hidden = chats.length === 0;
  $("kept-words").textContent = `${counted(chats.length, "chat")} kept in this browser: see Chats.`;
}

function chatRow({ id, title, when }) {
  const row = element("li");
  const opening = button("", async () => {
    $("chats").hidePopover();
    await openChat(id);
  }, "open-chat");
  if (id === currentChat()) opening.setAttribute("aria-current", "true");
  const date = new Date(when).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
  opening.append(element("span", "title", title), element("span", "quiet", date));
  const forgetting = button("Forget", async () => {
    await forget(id);
    listKept();
    ($("chat-list").querySelector("button") ?? $("open-chats")).focus();
  });
  forgetting.setAttribute("aria-label", `Forget the chat: ${title}`);
  row.append(opening, forgetting);
  return row;
}

$("chats").addEventListener("beforetoggle", listKept);
$("clear").addEventListener("click", async () => {
  await newChat();
  listKept();
});
for (const forgetting of document.querySelectorAll(".forget-all")) {
  forgetting.addEventListener("click", async () => {
    await forgetAll();
    forgetSettings();
    listKept();
  });
}
addEventListener("pagehide", () => {
  if (isAnswering()) keep(); // the answer as far as it came
});

// The start

function explain() {
  const { drawing, list } = drawTree(SAMPLE);
  $("sample-tree").replaceChildren(drawing, list);
  $("legend").append(...Object.entries(KINDS).map(([kind, { all }]) => swatchRow(kind, all)));
}

$("settings").addEventListener("change", keepSettings);
explain();
restoreSettings();
restore();
listKept();
nameModel();
if (!isPhone()) $("prompt").focus();
