"""What is asked for, before anything is loaded: files of single components, their places, arguments by other names."""
