"""What an update of the parameters is: its learning rate, its optimizer."""
