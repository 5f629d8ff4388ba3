// Follows a stream, and opens it again when it breaks or is silent.

const PAUSES = [0.5, 1, 2, 4, 8]; // seconds before the next try, by tries that failed in a row

/**
 * Runs until `signal` is aborted or the server refuses. `open(signal, alive)` gives the events, and calls `alive` when
 * anything arrives; `silence()`: the seconds after which a stream without that is given up. `onState` gets {} with each
 * event, {message, pause} when two tries have failed or a stream is silent (the next try is in `pause` seconds), and
 * {message} when the server refuses.
 */
export async function follow({open, silence, onEvent, onState, pauses = PAUSES}, signal) {
  for (let failures = 1; !signal.aborted; failures += 1) {
    let message = 'The server ended the stream.';
    let silent = 0; // seconds after which it was given up
    let timer;
    const inner = new AbortController();
    const alive = () => {
      const longest = silence();
      clearTimeout(timer);
      timer = setTimeout(() => {
        silent = longest;
        inner.abort();
      }, longest * 1000);
    };
    alive();
    try {
      for await (const event of open(AbortSignal.any([signal, inner.signal]), alive)) {
        if (signal.aborted) return;
        failures = 0;
        onState({});
        onEvent(event);
        alive();
      }
    } catch (error) {
      if (signal.aborted) return;
      message = silent ? `No data for ${silent} seconds.` : error.message;
      if (error.status >= 400 && ![429, 503].includes(error.status)) return onState({message});
    } finally {
      clearTimeout(timer);
    }
    const pause = pauses[Math.min(failures, pauses.length - 1)];
    if (failures || silent) onState({message, pause});
    await new Promise((resolve) => {
      const wait = setTimeout(resolve, pause * 1000);
      signal.addEventListener('abort', () => resolve(clearTimeout(wait)), {once: true});
    });
  }
}

/** Runs `start(signal)` while the page can be seen. Returns the function that ends it. */
export function whileVisible(start) {
  let controller = null;
  const update = () => {
    controller?.abort();
    if (!document.hidden) start((controller = new AbortController()).signal);
  };
  update();
  document.addEventListener('visibilitychange', update);
  return () => {
    document.removeEventListener('visibilitychange', update);
    controller?.abort();
  };
}
