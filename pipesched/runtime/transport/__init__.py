"""Transport: sends values between ranks in different processes."""
