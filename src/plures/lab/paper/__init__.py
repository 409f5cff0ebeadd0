"""The paper: its published figures, which runs each table and figure needs, and how they are drawn."""
