"""What the command line shows a person: one file a command, drawing on the rooms and holding no logic of theirs."""
