"""What any HTTP front needs: limits, keys, hosts, errors, streams, an orderly end. It knows no engine and no OpenAI."""
