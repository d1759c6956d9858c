"""Below the app: the port, connections and their bytes, and the server that ends them in order."""
