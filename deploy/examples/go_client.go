// go_client.go: attention from Go, using only its standard library.
//
//   go run go_client.go [http://127.0.0.1:8080]
package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"log"
	"math"
	"net/http"
	"os"
)

type Tensor struct {
	Shape []int  `json:"shape"`
	Dtype string `json:"dtype"`
	Data  []byte `json:"data"` // encoding/json writes and reads a []byte as a base64 string
}

func tensor(shape []int, numbers ...float32) *Tensor {
	var data bytes.Buffer
	binary.Write(&data, binary.LittleEndian, numbers)
	return &Tensor{shape, "float32", data.Bytes()}
}

func (t *Tensor) numbers() []float32 {
	numbers := make([]float32, len(t.Data)/4)
	binary.Read(bytes.NewReader(t.Data), binary.LittleEndian, numbers)
	return numbers
}

// Problem has its options as pointers. A nil option is not sent, and the server uses its default. Without pointers Go
// would send zero values, but a scale of 0 and a window of [0, 0] are not the defaults.
type Problem struct {
	Q      *Tensor  `json:"q"`
	K      *Tensor  `json:"k"`
	V      *Tensor  `json:"v"`
	Causal bool     `json:"causal,omitempty"`
	Scale  *float64 `json:"scale,omitempty"`  // 1/sqrt(D)
	Window *[2]int  `json:"window,omitempty"` // how many keys a query sees to its left and right; [-1, -1]: all
}

type Result struct {
	Out, Lse *Tensor
	Backend  string
	Hints    []string // what looks wrong in the request, although the server has computed it
}

// Refusal is what the server answers instead of a result. Detail is one sentence, Code is stable, and Pointer names
// the wrong member of the request.
type Refusal struct{ Detail, Code, Pointer string }

func (r *Refusal) Error() string { return fmt.Sprintf("%s (%s at %s)", r.Detail, r.Code, r.Pointer) }

func forward(url string, problem Problem) (*Result, error) {
	body, err := json.Marshal(problem)
	if err != nil {
		return nil, err
	}
	answer, err := http.Post(url+"/v1/attention/forward", "application/json", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		refusal := &Refusal{}
		if err := json.NewDecoder(answer.Body).Decode(refusal); err != nil {
			return nil, fmt.Errorf("%s: %w", answer.Status, err)
		}
		return nil, refusal
	}
	result := &Result{}
	return result, json.NewDecoder(answer.Body).Decode(result)
}

func main() {
	url := "http://127.0.0.1:8080"
	if len(os.Args) > 1 {
		url = os.Args[1]
	}
	// Two queries over two keys, causal: the first query sees only the first key, so its row of out is the first row of v.
	shape := []int{1, 2, 1, 2} // axes: batch, position, head, channel [B, S, H, D]
	q, v := tensor(shape, 1, 0, 0, 1), tensor(shape, 1, 2, 3, 4)
	result, err := forward(url, Problem{Q: q, K: q, V: v, Causal: true})
	if err != nil {
		log.Fatal("refused: ", err)
	}
	for _, hint := range result.Hints {
		log.Print("hint: ", hint)
	}
	weight := 1 / (1 + math.Exp(-1/math.Sqrt2)) // weight that the second query gives to the second key
	for i, want := range []float64{1, 2, 1 + 2*weight, 2 + 2*weight} {
		if got := float64(result.Out.numbers()[i]); math.Abs(got-want) > 1e-5 {
			log.Fatalf("out[%d] is %g, not %g", i, got, want)
		}
	}
	fmt.Printf("%s: out %.4f is right\n", result.Backend, result.Out.numbers())
	zero := 0.0 // a pointer to 0 is sent: with a scale of 0 all keys have the same weight
	if result, err = forward(url, Problem{Q: q, K: q, V: v, Scale: &zero}); err != nil || result.Out.numbers()[0] != 2 || len(result.Hints) != 1 {
		log.Fatal("a scale of 0 is not 0, or has no hint: ", err)
	}

	if _, err := forward(url, Problem{Q: q, K: q, V: tensor([]int{1, 3, 1, 2}, 1, 2, 3, 4, 5, 6)}); err == nil {
		log.Fatal("three values for two keys were not refused")
	} else {
		fmt.Println("refused:", err)
	}
}
