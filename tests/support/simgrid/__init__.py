"""What the tests against SimGrid run under the Python that SimGrid is installed for."""
