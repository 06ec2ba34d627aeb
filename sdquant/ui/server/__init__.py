"""The page as it is served: the guard before the page's own code, routes, bodies, headers, sign-in, a clean end."""
