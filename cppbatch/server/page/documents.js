// @ts-check
// PDFs and zip files as texts: the server reads them (POST /file-texts).
//
//   isPdf(file) -> whether it begins like one, whatever its name
//   documentTexts(file) -> {files: [{file, text}], skipped: [{file, reason}]}; throws Error without an answer
//   dataUrl(blob) -> its data URL
import {request} from './api.js';

export const isPdf = async (file) => await file.slice(0, 5).text() === '%PDF-';

/** @param {Blob} blob @returns {Promise<string>} */
export const dataUrl = (blob) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(/** @type {string} */ (reader.result));
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/** @param {File} file */
export async function documentTexts(file) {
  const data = (await dataUrl(file)).split(',', 2)[1];
  try {
    return await request('/file-texts', {body: {name: file.name, data}});
  } catch (error) {
    if (error.status) throw error;
    throw new Error('its upload was interrupted; if the server is still running, the file may exceed its --max-body-mb', {cause: error});
  }
}
