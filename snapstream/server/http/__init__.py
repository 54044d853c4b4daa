"""Parts of any HTTP front: limits, keys, hosts, errors, streams, an orderly end. They know no engine and no OpenAI."""
