// Numbers, sizes, times and ids as people read them.

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : Number(value.toPrecision(digits + 1)).toString();
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  let value = bytes ?? 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at === 0 ? value : value.toFixed(1)} ${units[at]}`;
}

export function ago(seconds, now = Date.now() / 1000) {
  if (seconds === null || seconds === undefined) return "–";
  return duration(Math.max(0, now - seconds)) + " ago";
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} d`;
}

export const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
export const last = (path) => path.split("/").pop();
export const short = (digest) => (digest ? digest.slice(0, 12) : "–");
export const runName = (id) => (id.length > 20 ? `${id.slice(0, 8)}…${id.slice(id.indexOf(":"))}` : id);
export const runLink = (id) => `#/run/${encodeURIComponent(id)}`;
