"""The routes of OpenAI's API: what they understand, and how they answer."""
