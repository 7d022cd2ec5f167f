"""A Hub on this machine: enough of the Hugging Face HTTP interface to create a repository, upload
and commit, and to fail."""
import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    """Serves on 127.0.0.1; `repos` maps owner/name to what is committed, `requests` lists what was
    asked."""

    def __init__(self, token='a-token', large=('.safetensors',), fail=()):
        self.token, self.large, self.fail = token, large, set(fail)  # each failure happens once
        self.repos, self.private, self.blobs, self.requests, self.commits = {}, {}, {}, [], []

    def __enter__(self):
        hub = self

        class Handler(_Handler): pass
        Handler.hub = hub
        self.server = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self.server.daemon_threads = True
        self.url = f'http://127.0.0.1:{self.server.server_port}'
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.server.shutdown()
        self.server.server_close()

    def fails(self, how):
        now = how in self.fail
        self.fail.discard(how)
        return now

    # What is asked, by path

    def create(self, body):
        name = f"{body['organization']}/{body['name']}"
        if self.fails('denied'): return 403, {'error': 'no write access'}
        if name in self.repos:
            return 409, {
                'error': 'You already created this model repo', 'url': f'{self.url}/{name}'}
        self.repos[name] = {}
        self.private[name] = body.get('visibility') == 'private' or bool(body.get('private'))
        return 200, {'url': f'{self.url}/{name}', 'name': name, 'id': '1'}

    def info(self, name):
        if name not in self.repos: return 404, {'error': 'Repository not found'}
        def described(path, data):
            blob = hashlib.sha1(b'blob %d\0' % len(data) + data).hexdigest()
            return {'rfilename': path, 'size': len(data), 'blobId': blob}
        files = [described(path, data) for path, data in self.repos[name].items()]
        return 200, {
            'id': name, 'modelId': name, 'private': self.private[name], 'sha': 'a' * 40, 'tags': [],
            'downloads': 0, 'likes': 0,
            'siblings': [{'rfilename': '.gitattributes', 'size': 9}, *files]}

    def preupload(self, name, body):
        if name not in self.repos: return 404, {'error': 'Repository not found'}
        def how_to_upload(path):
            mode = 'lfs' if path.endswith(self.large) else 'regular'
            return {'path': path, 'uploadMode': mode, 'shouldIgnore': False}
        return 200, {'files': [how_to_upload(file['path']) for file in body['files']]}

    def batch(self, body):
        def where_to_put(blob):
            upload = {'href': f"{self.url}/put/{blob['oid']}"}
            return {'oid': blob['oid'], 'size': blob['size'], 'actions': {'upload': upload}}
        return 200, {'transfer': 'basic', 'objects': list(map(where_to_put, body['objects']))}

    def put(self, oid, data):
        if hashlib.sha256(data).hexdigest() != oid:
            return 400, {'error': 'other bytes than announced'}
        self.blobs[oid] = data
        return 200, {}

    def commit(self, name, lines):
        if self.fails('conflict'): return 409, {'error': 'the branch was changed meanwhile'}
        files = {}
        for line in map(json.loads, lines.splitlines()):
            value = line['value']
            if line['key'] == 'file': files[value['path']] = base64.b64decode(value['content'])
            if line['key'] == 'lfsFile': files[value['path']] = self.blobs[value['oid']]
        self.repos[name].update(files)
        self.commits.append(sorted(files))
        return 200, {
            'commitUrl': f'{self.url}/{name}/commit/{"b" * 40}', 'commitOid': 'b' * 40,
            'success': True}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'

    def log_message(self, *args): pass

    def answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header('Content-Type', 'application/json')
        self.send_header('Content-Length', str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def handle_any(self):
        hub, path = self.hub, self.path.split('?')[0]
        data = self.rfile.read(int(self.headers.get('Content-Length') or 0))
        allowed = self.headers.get('Authorization') == f'Bearer {hub.token}'
        hub.requests.append((self.command, path, bool(self.headers.get('Authorization'))))
        def match(pattern): return re.fullmatch(pattern, path)
        if m := match(r'/put/(\w+)'): return self.answer(*hub.put(m[1], data))
        if not allowed: return self.answer(401, {'error': 'Invalid username or password.'})
        if match('/api/repos/create'): return self.answer(*hub.create(json.loads(data)))
        if match('/api/validate-yaml'): return self.answer(200, {'errors': [], 'warnings': []})
        if m := match('/api/models/([^/]+/[^/]+)'): return self.answer(*hub.info(m[1]))
        if m := match('/api/models/([^/]+/[^/]+)/preupload/main'):
            return self.answer(*hub.preupload(m[1], json.loads(data)))
        if match(r'/[^/]+/[^/]+\.git/info/lfs/objects/batch'):
            return self.answer(*hub.batch(json.loads(data)))
        if m := match('/api/models/([^/]+/[^/]+)/commit/main'): return self.committed(m[1], data)
        return self.answer(404, {'error': f'this Hub knows no {path}'})

    def committed(self, name, data):
        if self.hub.fails('lost before'): return self.hang_up()
        result = self.hub.commit(name, data)
        return self.hang_up() if self.hub.fails('lost after') else self.answer(*result)

    def hang_up(self):
        self.close_connection = True
        self.connection.close()

    do_GET = do_POST = do_PUT = handle_any
