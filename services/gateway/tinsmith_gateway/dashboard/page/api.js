// Requests to the gateway: the key, what has not changed, and what went wrong, in words.

const STORED = "tinsmith-key";
const known = new Map(); // path -> {etag, value}

export class KeyNeeded extends Error {}

export const hasKey = () => sessionStorage.getItem(STORED) !== null;

export function setKey(key) {
  known.clear();
  sessionStorage.setItem(STORED, key);
}

export function forgetKey() {
  known.clear();
  sessionStorage.removeItem(STORED);
}

export async function get(path) {
  const headers = {};
  const key = sessionStorage.getItem(STORED);
  if (key !== null) headers["X-API-Key"] = key;
  const before = known.get(path);
  if (before) headers["If-None-Match"] = before.etag;
  let answer;
  try {
    answer = await fetch(`api/v1/dashboard/${path}`, { headers, cache: "no-store", credentials: "omit" });
  } catch {
    throw new Error("The gateway cannot be reached; trying again.");
  }
  if (answer.status === 304) return before.value;
  const told = await answer.json().catch(() => ({}));
  if (answer.status === 401) throw new KeyNeeded(told.detail ?? "");
  if (!answer.ok) throw new Error(told.detail ?? `The gateway answered ${answer.status}.`);
  if (known.size > 100) known.clear();
  known.set(path, { etag: answer.headers.get("ETag"), value: told });
  return told;
}
