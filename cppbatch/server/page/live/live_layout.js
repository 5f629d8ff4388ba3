// Where the rows of sequences and the blocks of KV cells are. No DOM.

/** A sequence keeps its row until it ends, a new one takes the first free row (null), and free rows at the end are
 * removed: placeRows([7, 8, 9], [7, 9, 10]) is [7, 10, 9]. */
export function placeRows(rows, numbers) {
  const next = rows.map((number) => (numbers.includes(number) ? number : null));
  for (const number of numbers.filter((each) => !next.includes(each)).sort((a, b) => a - b)) {
    const free = next.indexOf(null);
    next[free < 0 ? next.length : free] = number;
  }
  return next.slice(0, next.findLastIndex((number) => number !== null) + 1);
}

/** The class of a row's colour. */
export const colourOf = (place) => `c${(place % 8) + 1}`;

/**
 * Sequences with a common prefix become neighbours: a shared segment is one block over their rows, and what follows it
 * in each of them is beside it. What only cached prefixes hold comes below.
 *
 *     [0, 10) of 1 and 2, [10, 15) of 1, [10, 12) of 2, [0, 5) cached:     1  ##########aaaaa
 *                                                                          2  ##########bb
 *                                                                             ccccc
 *
 * `place(seq_id)`: the order of the sequences; a group stands where its first one does.
 * Returns {blocks: [{segment, row, rows}], rows, held}: `held` of the rows are of sequences.
 */
export function layoutCells(segments, place) {
  const keys = new Map(); // of each sequence: for each of its segments, the first place of a holder, as text
  for (const {sequences} of segments.toSorted((a, b) => a.start - b.start)) {
    const first = String.fromCharCode(1 + Math.min(...sequences.map(place)));
    for (const id of sequences) keys.set(id, (keys.get(id) ?? '') + first);
  }
  const ids = [...keys.keys()].sort((a, b) => (keys.get(a) < keys.get(b) ? -1 : 1));
  let rows = ids.length;
  let end = Infinity; // of the last cached segment; one that begins behind it is in the same row
  const blocks = segments.map((segment) => {
    const {start, tokens, sequences, cached} = segment;
    if (!cached) return {segment, row: Math.min(...sequences.map((id) => ids.indexOf(id))), rows: sequences.length};
    if (start < end) rows += 1;
    end = start + tokens;
    return {segment, row: rows - 1, rows: 1};
  });
  return {blocks, rows, held: ids.length};
}

/** cached: of no running sequence; shared: of several; own: of one. */
export const kindOf = ({cached, sequences}) => (cached ? 'cached' : sequences.length > 1 ? 'shared' : 'own');

/** The smallest of 64, 96, 128, 192, 256 ... that is at least `n`: a width that seldom changes while `n` grows. */
export function mapWidth(n) {
  let end = 64;
  while (end < n) end *= 2;
  return end > 64 && end * 0.75 >= n ? end * 0.75 : end;
}
