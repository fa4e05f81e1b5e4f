"""The schedules of the field, as builders that know no machine."""
