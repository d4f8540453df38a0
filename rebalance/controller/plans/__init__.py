"""Plans of the controller: how they are asked for, made, recorded, proposed and published."""
