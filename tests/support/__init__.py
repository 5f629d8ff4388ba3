"""What tests of several folders use: fakes, tiny models, servers, clients, samples."""
