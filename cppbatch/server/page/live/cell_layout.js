// @ts-check
// Where the segments of KV cells are in the map. No DOM.

/**
 * Sequences with a common prefix become neighbours: a shared segment is one block over their rows, and what follows it
 * in each of them is beside it. Segments that only cached prefixes hold come below.
 *
 *     [0, 10) of 1 and 2, [10, 15) of 1, [10, 12) of 2, [0, 5) cached:     1  ##########aaaaa
 *                                                                          2  ##########bb
 *                                                                             ccccc
 *
 * `segments`: as in GET /live. `place(seq_id)`: the order of the sequences; a group stands where its first one does.
 * Returns {blocks: [{segment, row, rows}], rows, held}; `held`: the rows of sequences.
 */
export function layoutCells(segments, place) {
  const chains = new Map();
  const first = new Map();
  for (const segment of [...segments].sort((a, b) => a.start - b.start)) {
    first.set(segment, Math.min(...segment.sequences.map(place)));
    for (const id of segment.sequences) chains.set(id, [...(chains.get(id) ?? []), segment]);
  }
  const ids = [...chains.keys()].sort((a, b) => {
    const [left, right] = [chains.get(a), chains.get(b)];
    const at = left.findIndex((segment, i) => segment !== right[i]);
    return at < 0 || at >= right.length ? left.length - right.length : first.get(left[at]) - first.get(right[at]);
  });
  const blocks = new Map();
  ids.forEach((id, row) => chains.get(id).forEach((segment) => {
    if (blocks.has(segment)) blocks.get(segment).rows += 1;
    else blocks.set(segment, {segment, row, rows: 1});
  }));
  let rows = ids.length;
  let end = Infinity; // of the last cached segment; one that begins behind it is in the same row
  for (const segment of segments.filter(({cached}) => cached)) {
    if (segment.start < end) rows += 1;
    end = segment.start + segment.tokens;
    blocks.set(segment, {segment, row: rows - 1, rows: 1});
  }
  return {blocks: [...blocks.values()], rows, held: ids.length};
}

/** cached: of no running sequence; shared: of several; own: of one. */
export const kindOf = ({cached, sequences}) => (cached ? 'cached' : sequences.length > 1 ? 'shared' : 'own');
