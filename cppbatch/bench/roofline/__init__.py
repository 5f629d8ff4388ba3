"""`cppbatch bench roofline`: whether decode steps are bound by memory or by compute."""
