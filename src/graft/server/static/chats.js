// Conversations kept in the browser: each under a name of its own, so that tabs do not overwrite each other's.

import { lasting, ofTab } from "./storage.js";

const PREFIX = "graft.chat.";
const CURRENT = "graft.current"; // the conversation that this tab shows

export const currentChat = () => ofTab.getItem(CURRENT);

export function useChat(id) {
  ofTab.setItem(CURRENT, id);
}

export const newChatId = () => `${Date.now()}-${Math.random().toString(36).slice(2, 8)}`;

function names() {
  return Array.from({ length: lasting.length }, (_, place) => lasting.key(place))
    .filter((name) => name.startsWith(PREFIX));
}

// A conversation as it was kept: {when, turns}; null where there is none or it is damaged
export function readChat(id) {
  try {
    const chat = JSON.parse(lasting.getItem(PREFIX + id));
    return chat.turns.length && chat.turns.every(isSound) ? chat : null;
  } catch {
    return null;
  }
}

function isSound({ prompt, settings, answers }) {
  const isAnswer = ({ text, rounds }) => typeof text === "string" && rounds.every((round) => Array.isArray(round.new));
  return typeof prompt === "string" && settings.sampling !== undefined && answers.length > 0 && answers.every(isAnswer);
}

// All of them, the latest first: [{id, when, title}]
export function listChats() {
  const found = [];
  for (const name of names()) {
    const id = name.slice(PREFIX.length);
    const chat = readChat(id);
    if (chat) found.push({ id, when: chat.when, title: chat.turns[0].prompt });
    else lasting.removeItem(name);
  }
  return found.sort((a, b) => b.when - a.when);
}

// Keeps a conversation. Where the browser has no room left, trees go first, then the oldest conversations.
export function keepChat(id, turns) {
  if (!turns.length) {
    forgetChat(id);
    return;
  }
  const chat = { when: Date.now(), turns };
  const older = () => listChats().filter((one) => one.id !== id);
  const ways = [
    () => {},
    () => older().forEach((one) => putChat(one.id, withoutTrees(readChat(one.id)))),
    () => Object.assign(chat, withoutTrees(chat, 1)),
    ...older().reverse().map((one) => () => forgetChat(one.id)),
    () => Object.assign(chat, withoutTrees(chat)),
  ];
  for (const makeRoom of ways) {
    makeRoom();
    if (putChat(id, chat)) return;
  }
  forgetChat(id);
}

function putChat(id, chat) {
  try {
    lasting.setItem(PREFIX + id, JSON.stringify(chat));
    return true;
  } catch { // no room
    return false;
  }
}

// last: the number of last turns whose trees stay
function withoutTrees({ when, turns }, last = 0) {
  const bare = (answer) => ({ ...answer, rounds: answer.rounds.map((round) => ({ new: round.new })) });
  const thinned = turns.slice(0, turns.length - last).map((turn) => ({ ...turn, answers: turn.answers.map(bare) }));
  return { when, turns: [...thinned, ...turns.slice(turns.length - last)] };
}

export function forgetChat(id) {
  lasting.removeItem(PREFIX + id);
}

export function forgetAllChats() {
  for (const name of names()) lasting.removeItem(name);
}
