// Prompts made of the columns of a table: 'Classify: {text}'. The syntax is that of `cppbatch batch --template`. No DOM.

/** A text with the names of columns in braces; `{{` and `}}` are braces. Throws an `Error` that says what is wrong. */
export class PromptTemplate {
  parts = [{text: '', name: null}]; // a text, and the column behind it or null

  constructor(source) {
    for (const [found, name] of source.matchAll(/\{\{|\}\}|\{([^{}!:]+)\}|[{}]|[^{}]+/g)) {
      const last = this.parts.at(-1);
      if (found === '{' || found === '}') {
        throw new Error(`Unmatched ${found}. Write column names in braces, like {text}, and double all ` +
          'other braces');
      }
      if (name === undefined) {
        last.text += found === '{{' || found === '}}' ? found[0] : found;
      } else {
        last.name = name;
        this.parts.push({text: '', name: null});
      }
    }
  }

  /** The columns that it names. */
  get fields() {
    return [...new Set(this.parts.map(({name}) => name).filter((name) => name !== null))];
  }

  /** The prompt of a row: an object with a text for each column. */
  render(row) {
    return this.parts.map(({text, name}) => text + (name === null ? '' : row[name])).join('');
  }
}
