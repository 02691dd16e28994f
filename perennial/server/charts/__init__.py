"""Charts as SVG, for reports and live pages: no script, and colours from the page's style."""
