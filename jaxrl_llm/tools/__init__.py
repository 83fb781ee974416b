"""Tools beside training, which never imports them: migration, plans, reports, model cards, and Tinker's server."""
