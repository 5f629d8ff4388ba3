"""cppbatch on Ray Serve: replicas on one machine or many. Needs the extra `ray`."""
