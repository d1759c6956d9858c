"""What people look at: the description of the API, its page, and the live status page. Guards nothing and decides nothing."""
