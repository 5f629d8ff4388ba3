// @ts-check
// Numbers as text. No DOM.
//
//   count(1234567) '1,234,567'      short(1234567) '1.2 M'          fixed(3.14159, 2) '3.14'
//   percent(0.913) '91%'            seconds(0.0123) '12 ms'         rate(93.4) '93.4 tokens/s'
//   bytes(98362432) '94 MiB'        ago(unixSeconds) '3 min ago'    clock(unixSeconds) '14:05:09'
//   plural(2, 'token') '2 tokens'   dateTime(unixSeconds) '22 Nov 2026, 14:05'

const NONE = '–';
const formats = []; // by digits; made once, because making one takes long
const decimals = (n, digits) => (formats[digits] ??= new Intl.NumberFormat('en', {
  minimumFractionDigits: digits, maximumFractionDigits: digits})).format(n);
const known = (value) => typeof value === 'number' && Number.isFinite(value);

export const count = (n) => (known(n) ? decimals(n, 0) : NONE);

export const plural = (n, noun, many = `${noun}s`) => `${count(n)} ${n === 1 ? noun : many}`;

export const fixed = (n, digits = 1) => (known(n) ? decimals(n, digits) : NONE);

export const percent = (share, digits = 0) => (known(share) ? `${fixed(share * 100, digits)}%` : NONE);

export const rate = (perSecond, unit = 'tokens/s') =>
  (known(perSecond) ? `${fixed(perSecond, perSecond < 100 ? 1 : 0)} ${unit}` : NONE);

export function short(n) {
  if (!known(n)) return NONE;
  for (const [unit, size] of [['G', 1e9], ['M', 1e6], ['k', 1e3]]) {
    if (Math.abs(n) >= Number(size)) return `${fixed(n / Number(size), n / Number(size) < 10 ? 1 : 0)} ${unit}`;
  }
  return count(n);
}

export function bytes(n) {
  if (!known(n)) return NONE;
  for (const [unit, power] of [['GiB', 3], ['MiB', 2], ['KiB', 1]]) {
    const value = n / 1024 ** Number(power);
    if (value >= 1) return `${fixed(value, value < 10 ? 1 : 0)} ${unit}`;
  }
  return `${count(n)} B`;
}

/** A length of time, given in seconds. */
export function seconds(s) {
  if (!known(s)) return NONE;
  if (s < 0.001) return `${fixed(s * 1000, 2)} ms`;
  if (s < 1) return `${fixed(s * 1000, s < 0.01 ? 1 : 0)} ms`;
  if (s < 60) return `${fixed(s, s < 10 ? 2 : 1)} s`;
  const whole = Math.round(s);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

export function ago(unixSeconds) {
  const s = Date.now() / 1000 - unixSeconds;
  if (!known(s)) return NONE;
  if (s < 45) return 'just now';
  for (const [unit, size] of [['d', 86400], ['h', 3600], ['min', 60]]) {
    if (s >= Number(size) || unit === 'min') return `${Math.max(1, Math.round(s / Number(size)))} ${unit} ago`;
  }
  return NONE;
}

export const clock = (unixSeconds) => new Date(unixSeconds * 1000).toLocaleTimeString('en-GB');

export const dateTime = (unixSeconds) =>
  new Date(unixSeconds * 1000).toLocaleString('en-GB', {dateStyle: 'medium', timeStyle: 'short'});
