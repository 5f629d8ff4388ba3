// Sets the stored theme before anything is painted. app.js changes it.
try {
  document.documentElement.dataset.theme = localStorage.getItem('cppbatch.theme') || 'auto';
} catch { /* no storage: the theme follows the system */ }
