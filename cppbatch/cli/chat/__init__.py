"""`cppbatch chat`: where the answers come from, the session, the terminal."""
