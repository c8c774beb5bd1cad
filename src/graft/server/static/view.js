// Scrolling: follow the end of a growing text, unless the reader has scrolled away.

import { $ } from "./parts.js";

export const isPhone = () => getComputedStyle($("messages")).overflowY === "visible"; // the document scrolls

// On a phone the panel stands below its answer. Its bars and its tree stay in view with the end of the text. A race
// needs the room for itself.
function endOfMessages() {
  const last = document.querySelector(".turn:last-child");
  const end = last?.querySelector(last.classList.contains("racing") ? ".answers" : "#live");
  return (end?.checkVisibility() ? end : $("messages")).getBoundingClientRect().bottom;
}

function pastTheEnd() { // pixels below the visible part
  if (isPhone()) return endOfMessages() - $("foot").getBoundingClientRect().top;
  return $("messages").scrollHeight - $("messages").scrollTop - $("messages").clientHeight;
}

export const isAtEnd = () => pastTheEnd() < 120;

export function scrollToEnd() {
  if (isPhone()) window.scrollBy({ top: Math.max(0, pastTheEnd()), behavior: "instant" });
  else $("messages").scrollTop = $("messages").scrollHeight;
}

export function bringIntoView(target, block) {
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
  target.scrollIntoView({ block, behavior: still ? "instant" : "smooth" });
}
