// Requests to the server, streams of events, and errors in everyday words.

import { ofTab } from "./storage.js";

let key = ofTab.getItem("graft.key") ?? ""; // forgotten with the tab

export const hasKey = () => key !== "";
export function useKey(given) {
  key = given;
  ofTab.setItem("graft.key", given);
}

// An error: `message` is for users, `said` is the server's own message.
export class Trouble extends Error {
  constructor(status, said = "", { wait = "", request = "" } = {}) {
    super(wordsFor(status, said, wait));
    Object.assign(this, { status, said, request });
  }

  get mayPass() {
    return ![400, 404, 413].includes(this.status); // these need another message
  }
}

const UNREACHABLE = 0;
const BROKEN_OFF = -1;

function wordsFor(status, said, wait) {
  if (status === 400 && said.includes("context")) {
    return "That is longer than the model can read at once. Shorten it, or start a new chat.";
  }
  const words = {
    [UNREACHABLE]: "The server cannot be reached. Is it still running?",
    [BROKEN_OFF]: "The connection broke off before the answer was done.",
    400: "The server cannot answer this message.",
    401: "This server asks for a key.",
    408: "The message took too long to arrive.",
    413: "The message is too large for this server. Shorten it.",
    429: `The server is busy. Try again ${wait ? `in ${wait} seconds` : "in a moment"}.`,
    503: "The server is not ready, or is shutting down. Try again in a moment.",
    504: "The answer took longer than this server allows.",
  };
  return words[status] ?? "Something went wrong on the server. Its log says what.";
}

// An error inside a stream has no status of its own.
const STATUSES = { timeout: 504, request_timeout: 408, rate_limit_exceeded: 429, unavailable: 503 };
function statusOf(error) {
  if (typeof error.code === "number") return error.code;
  return STATUSES[error.code] ?? (error.type === "invalid_request_error" ? 400 : 500);
}

export async function request(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = body ? { method: "POST", body: JSON.stringify(body) } : {};
  let response;
  try {
    response = await fetch(path, { ...options, headers, signal });
  } catch (error) {
    throw error.name === "AbortError" ? error : new Trouble(UNREACHABLE);
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const [wait, id] = [response.headers.get("retry-after"), response.headers.get("x-request-id")];
  throw new Trouble(response.status, said?.error?.message ?? "", { wait: wait ?? "", request: id ?? "" });
}

// The choices of a streamed completion as they come
export async function* stream(path, body, signal) {
  const response = await request(path, { ...body, stream: true }, signal);
  const id = response.headers.get("x-request-id") ?? "";
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new Trouble(BROKEN_OFF, "", { request: id });
    });
    if (done) throw new Trouble(BROKEN_OFF, "", { request: id }); // the last event is [DONE]
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event
        .split("\n")
        .filter((line) => line.startsWith("data: ")) // skip comments, which proxies may add
        .map((line) => line.slice("data: ".length))
        .join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Trouble(statusOf(chunk.error), chunk.error.message, { request: id });
      yield* chunk.choices;
    }
  }
}
