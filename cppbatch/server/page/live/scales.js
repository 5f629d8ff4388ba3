// @ts-check
// Scales of the charts and of the map of cells. No DOM.

/** The smallest of 1, 2, 5, 10, 20 ... that is at least `value`: the end of an axis that begins at 0. */
export function axisEnd(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((end) => end >= value * 0.999999);
}

/** The smallest of 64, 96, 128, 192, 256 ... that is at least `n`: a width that seldom changes while `n` grows. */
export function mapWidth(n) {
  let end = 64;
  while (end < n) end *= 2;
  return end > 64 && end * 0.75 >= n ? end * 0.75 : end;
}
