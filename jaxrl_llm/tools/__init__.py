"""Tools beside training, which never imports them: migration, plans, reports and model cards."""
