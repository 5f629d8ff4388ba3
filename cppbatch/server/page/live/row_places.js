// @ts-check
// Rows of the table of sequences. No DOM.

/**
 * The next rows: a sequence keeps its row until it ends, a new one takes the first free row, and free rows at the end
 * are removed. null is a free row.
 *
 *     placeRows([7, 8, 9], [7, 9, 10])   ->   [7, 10, 9]
 *
 * @param {(number | null)[]} rows @param {number[]} numbers
 */
export function placeRows(rows, numbers) {
  const next = rows.map((number) => (numbers.includes(number) ? number : null));
  for (const number of numbers.filter((each) => !next.includes(each)).sort((a, b) => a - b)) {
    const free = next.indexOf(null);
    next[free < 0 ? next.length : free] = number;
  }
  return next.slice(0, next.findLastIndex((number) => number !== null) + 1);
}

/** The class of the colour of a row, one of eight. @param {number} place */
export const colourOf = (place) => `c${(place % 8) + 1}`;
