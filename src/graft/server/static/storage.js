// The browser's storage, or memory where the browser denies it: then nothing outlives the page.

class Memory {
  #values = new Map();

  get length() {
    return this.#values.size;
  }

  key(place) {
    return [...this.#values.keys()][place] ?? null;
  }

  getItem(name) {
    return this.#values.get(name) ?? null;
  }

  setItem(name, value) {
    this.#values.set(name, String(value));
  }

  removeItem(name) {
    this.#values.delete(name);
  }
}

function storage(name) {
  try {
    return window[name] ?? new Memory();
  } catch {
    return new Memory();
  }
}

export const lasting = storage("localStorage"); // shared by all tabs
export const ofTab = storage("sessionStorage"); // ends with the tab
