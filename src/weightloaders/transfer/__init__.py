"""Moving the bytes: straight into parameter memory where dtype and layout allow, else through a small buffer."""
