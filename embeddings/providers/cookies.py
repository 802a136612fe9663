"""One client serves every tenant of a provider: what a server would remember of one, it is not told by the next."""

from http.cookiejar import CookieJar, DefaultCookiePolicy


def no_cookies() -> CookieJar:
    """A jar that takes none."""
    return CookieJar(DefaultCookiePolicy(allowed_domains=[]))
