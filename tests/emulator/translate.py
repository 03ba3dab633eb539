"""translate.py TO [FILE...]: translates kernels/cuda to C++ that a host's compiler reads. Writes the result as a tree
TO/kernels/cuda, and each translated FILE as TO/FILE.

If tests/emulator/kernels/cuda has a file of the same name, that file replaces the one of kernels/cuda. #line makes the
compiler's messages name the real file. Comments are removed. The constructs below are no C++ and are rewritten; all
other code stays as it is:

    name<A, B><<<grid, block, shared, stream>>>(args)   ->   emu::launch("name<A, B>", __PRETTY_FUNCTION__, name<A, B>, grid, block, ...)(args)
    cudaLaunchKernelEx(&config, name<A>, args)          ->   emu::launch_ex("name<A>", __PRETTY_FUNCTION__, &config, name<A>, args)
    extern __shared__ __align__(1024) char memory[];    ->   char *const memory = emu::dynamic_shared(1024);
    __shared__ float x[4], y;                           ->   references into a struct in the block's shared memory
    const __grid_constant__ cuda_args a                 ->   const cuda_args &a

If text looks like one of these constructs but cannot be parsed, the translation ends with its file and line."""
import os
import re
import sys

SOURCE, OVERLAY = "kernels/cuda", "tests/emulator/kernels/cuda"


def die(path, text, at, what):
    sys.exit(f"{path}:{text.count(chr(10), 0, at) + 1}: {what}")


def launches(path, text):
    """Finds the name of the launched kernel with its template arguments. It stands before <<<, on the same line or the
    line above, so the brackets are counted backwards."""
    while (at := text.find("<<<")) >= 0:
        ends = len(text[:at].rstrip())
        begin, depth = ends, 0
        if text[ends - 1] == ">":
            while begin > 0:
                begin -= 1
                depth += {">": 1, "<": -1}.get(text[begin], 0)
                if depth == 0:
                    break
        name = re.search(r"[A-Za-z_][\w:]*\Z", text[:begin])
        end = text.find(">>>", at)
        if not name or depth or end < 0 or text[end + 3] != "(" or ";" in text[name.start():end]:
            die(path, text, at, "a launch that translate.py cannot read")
        kernel, between, shape = text[name.start():ends], text[ends:at], text[at + 3:end]
        text = f'{text[:name.start()]}emu::launch("{kernel}", __PRETTY_FUNCTION__, {kernel},{between or " "}{shape}){text[end + 3:]}'
    return text


def shared(path, text):
    text = re.sub(r"extern __shared__ __align__\((\d+)\) char (\w+)\[\];", r"char *const \2 = emu::dynamic_shared(\1);", text)

    def static(match):
        names = re.findall(r"(\w+)\s*(?:\[[^\]]*\])*\s*(?:,|$)", match[2])
        if not names:
            die(path, text, match.start(), "shared variables that translate.py cannot read")
        held = f"shared_{names[0]}"
        return f"struct {held} {{ {match[1]}{match[2]}; }}; auto &[{', '.join(names)}] = emu::static_shared<{held}>();"

    return re.sub(r"__shared__ ((?:(?:__align__|alignas)\(\d+\) )?\w+ )([^;]*);", static, text)


def without_comments(text):
    """Replaces each comment by a space and by the line breaks of the comment, so that lines keep their numbers.
    Comments must go, because they may name what is translated, such as __shared__."""
    def blank(match):
        return match[0] if match[0][0] in "\"'" else " " + "\n" * match[0].count("\n")

    return re.sub(r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", blank, text, flags=re.DOTALL)


def translate(path, text):
    text = launches(path, without_comments(text))
    text = shared(path, text)
    text = re.sub(r"cudaLaunchKernelEx\((&\w+), (\w+(?:<[^;()]*?>)?), ", r'emu::launch_ex("\2", __PRETTY_FUNCTION__, \1, \2, ', text)
    text = re.sub(r"const __grid_constant__ ([\w<>]+) (\w+)", r"const \1 &\2", text)
    for word in ("<<<", "cudaLaunchKernelEx", "__shared__", "__grid_constant__"):
        for match in re.finditer(re.escape(word), text):
            die(path, text, match.start(), f"{word} that translate.py cannot read")
    return f'#line 1 "{path}"\n{text}'


def main(to, files):
    sources = [os.path.join(folder, name) for folder, _, names in os.walk(SOURCE) for name in names if name.endswith((".cu", ".cuh", ".h"))]
    for source in sources + files:
        instead = os.path.join(OVERLAY, os.path.relpath(source, SOURCE))
        path = instead if source in sources and os.path.exists(instead) else source
        with open(path) as file:
            text = translate(path, file.read())
        result = os.path.join(to, source)
        os.makedirs(os.path.dirname(result), exist_ok=True)
        if os.path.exists(result) and open(result).read() == text:
            continue # the translated file has not changed, so it is not written and make need not compile it again
        with open(result, "w") as file:
            file.write(text)


main(sys.argv[1], sys.argv[2:])
