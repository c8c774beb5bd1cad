// The settings: what the fields say, kept in the browser.

import { $ } from "./parts.js";
import { lasting } from "./storage.js";

const NAME = "graft.settings";
const FIELDS = ["system", "temperature", "top-p", "max-tokens", "seed"];

function within(id, least, most, otherwise) {
  const value = parseFloat($(id).value);
  return Number.isNaN(value) ? otherwise : Math.min(Math.max(value, least), most);
}

// What decides about an answer's text, its length aside
export function chosenSettings() {
  const seed = parseInt($("seed").value, 10);
  return {
    system: $("system").value.trim(),
    sampling: {
      temperature: within("temperature", 0, 2, 0),
      top_p: within("top-p", 0.01, 1, 1),
      ...(Number.isNaN(seed) ? {} : { seed }),
    },
  };
}

export const maxTokens = () => Math.max(1, parseInt($("max-tokens").value, 10) || 256);

export function keepSettings() {
  try {
    lasting.setItem(NAME, JSON.stringify(Object.fromEntries(FIELDS.map((id) => [id, $(id).value]))));
  } catch { // no room: they hold until the page is left
  }
}

export function restoreSettings() {
  try {
    const kept = JSON.parse(lasting.getItem(NAME) ?? "{}");
    for (const id of FIELDS) if (typeof kept[id] === "string") $(id).value = kept[id];
  } catch {
    lasting.removeItem(NAME);
  }
}

export function forgetSettings() {
  lasting.removeItem(NAME);
  for (const id of FIELDS) $(id).value = $(id).defaultValue;
}
